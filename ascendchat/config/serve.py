"""Configs of serving: serve, bench serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ascendchat.config.flags import option
from ascendchat.config.generate import KvCacheDtype, ModelConfig


@dataclass(frozen=True)
class ServeConfig(ModelConfig):
    """A web chat and an OpenAI-compatible API for one model, on one device or several."""

    "# Model"

    "# Server"
    host: str = "127.0.0.1"
    "address to listen on; any other than this machine's own needs API keys (--api-key-file) or --no-auth"
    port: int = option(8000, also=("p",), least=0, most=65535)
    "port to listen on; 0: any free one"
    devices: int = option(1, also=("num_gpus", "npus", "gpus"), least=1, most=1024)
    "devices to serve from, one process each"
    model_name: str = option("", also=("served_model_name",))
    "name of the model in the API; by default run/stage"
    web: bool = True
    "serve the web page at /"

    "# Generation"
    slots: int | None = option(None, also=("max_num_seqs",), least=1, most=1e5)
    "answers generated at the same time on each device; by default 16 on a CPU, 64 elsewhere"
    context: int | None = option(None, also=("max_model_len",), least=16, most=1e6)
    "maximum number of tokens of prompt and answer together; by default the row length of training"
    kv_cache_dtype: KvCacheDtype = "auto"
    "dtype of the key-value cache: the model's own (auto), or 8 bits (fp8), which takes half the memory"
    enable_thinking: bool | None = None
    "whether answers begin by thinking, for a chat template that knows it (Qwen3)"
    temperature: float = option(0.6, also=("t",), least=0, most=10)
    "sampling temperature of requests that name none; 0: always the likeliest token"
    top_k: int = option(50, also=("k",), least=0, most=1e7)
    "choose among this many tokens, for requests that name no top_k; 0: all"
    max_tokens: int = option(512, also=("m",), least=1, most=1e6)
    "maximum number of tokens of an answer, for requests that name no limit"
    compile: bool = False
    "compile the decoding steps of a Hugging Face model before the server is ready, which takes minutes; CUDA"

    "# Limits"
    max_queue: int = option(256, least=0, most=1e6)
    "requests that may wait for a free slot; further ones are rejected with 503 and Retry-After"
    queue_timeout: float = option(60.0, above=0, most=1e6)
    "seconds that a request may wait for its first token"
    request_timeout: float = option(600.0, above=0, most=1e6)
    "seconds that an answer may take; then it ends with what is written (finish_reason length, timed_out true)"
    max_body: int = option(4194304, least=1024, most=1e10)
    "maximum size of a request body in bytes"
    client_timeout: float = option(30.0, above=0, most=1e6)
    "seconds in which a request must have arrived completely, and a client must have read what was sent to it"
    max_connections: int = option(1000, least=1, most=1e6)
    "maximum number of connections; beyond it, idle ones are closed, then new ones get 503"
    rate_limit: float = option(0.0, least=0, most=1e9)
    "requests per minute for each API key, or address where there are no keys; 0: no limit"
    drain: float = option(30.0, least=0, most=1e6)
    "seconds that running answers get to finish when the server is stopped"

    "# Access"
    api_key_file: str = ""
    "file with one API key per line; by default the keys in $ASCENDCHAT_API_KEYS, separated by commas, if any"
    no_auth: bool = False
    "listen beyond this machine without keys: everyone who reaches the port can use the model"
    allowed_host: tuple[str, ...] = ()
    "further host names by which browsers may address this server, such as that of a reverse proxy"
    cors_origin: tuple[str, ...] = ()
    "origins whose web pages may use the API, such as https://example.org"
    weight_updates: bool = False
    "let a trainer pause the server and replace its weights; needs a key"

    "# Logging"
    access_log: str = ""
    "file for the access log, one JSON object per request; by default standard error"
    log_messages: bool = False
    "write prompts and answers into the access log"


@dataclass(frozen=True)
class BenchServeConfig:
    """Load a running server with streaming requests: first token, gap between tokens, tokens per second."""

    "# Server"
    url: str = "http://127.0.0.1:8000"
    "address of the server, this one or another with OpenAI's API"
    api: Literal["completions", "chat"] = "completions"
    "completions: prompts of random token ids; chat: questions in words"
    api_key_file: str = ""
    "file whose first line is the API key; by default the first key in $ASCENDCHAT_API_KEYS, if any"

    "# Load"
    arrivals: Literal["closed", "poisson"] = "closed"
    "closed: --concurrency clients, each asks again when answered; poisson: --rate requests per second"
    concurrency: int = option(16, also=("c",), least=1, most=1e5)
    "clients at the same time; with poisson the maximum number of running requests"
    rate: float = option(4.0, above=0, most=1e6)
    "requests per second with poisson"
    seconds: float = option(30.0, above=0, most=1e6)
    "seconds during which requests are sent; those running then are still answered"
    warmup: float = option(0.0, least=0, most=1e6)
    "seconds of the same load before the clock starts"

    "# Requests"
    prompt_tokens: int = option(64, least=1, most=1e6)
    "tokens of each prompt; with chat approximately"
    max_tokens: int = option(64, least=1, most=1e6)
    "tokens of each answer; stop tokens are ignored"
    temperature: float = option(1.0, least=0, most=10)
    "sampling temperature; 0: always the likeliest token"
    top_k: int = option(0, least=0, most=1e7)
    "choose among this many tokens; 0: all"
    timeout: float = option(120.0, above=0, most=1e6)
    "seconds after which a request without its complete answer counts as failed"

    "# Measurement"
    processes: int | None = option(None, least=1, most=1024)
    "processes that send; by default one for every 64 clients, on at most half of the cores"
    compare_serial: bool = False
    "afterwards send the same requests one after another, for as long, and print how much faster batching was"
    seed: int = option(0, least=0, most=1e18)
    "seed of prompts, answers and arrivals"
    json: bool = False
    "print one JSON object instead of a table"
