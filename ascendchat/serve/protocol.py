"""The requests of the API, field by field: OpenAI's, and those of vLLM that RL clients use.

What is listed here is honoured or harmless. A known field that this server cannot honour may only be null, and
every other name is refused: a client never believes in something that did not happen. app.py names these models in
its routes; prompts.py reads them and makes engine requests of them.

The first bad entry of a list is enough (`Listed`), and an object is counted before it is looked at: a body with
100,000 mistakes costs no more than one with a single one.

Names of classes, and their docstrings, stand in /openapi.json: without the underscore of those used here only.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic.json_schema import GenerateJsonSchema

MAX_CHOICES = 128  # `n`
MAX_PROMPTS = 2048  # of one request to /v1/completions
MAX_TOOLS = 128
MAX_CALLS = 1024  # of one message
MAX_TOPS = 20
MAX_BIASES = 1024  # tokens in logit_bias
MAX_METADATA = 16
MAX_LABEL = 512  # characters of what is only a label: names of users and the like
MAX_STOP = 4096  # characters

Text = Annotated[str, StringConstraints(min_length=1)]
Label = Annotated[str, StringConstraints(max_length=MAX_LABEL)]
Salt = Annotated[str, StringConstraints(min_length=1, max_length=MAX_LABEL)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP)]
ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Item = TypeVar("Item")
Listed = Annotated[list[Item], Field(fail_fast=True)]


def at_most(entries: int, name: str) -> BeforeValidator:
    """An object has so many entries at most."""

    def count(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > entries:
            raise ValueError(f"{name}: expected at most {entries} entries, found {len(given)}")
        return given

    return BeforeValidator(count)


Metadata = Annotated[dict[str, Label], at_most(MAX_METADATA, "metadata")]


def public(model: type) -> str:
    """The name of a class in /openapi.json."""
    return model.__name__.lstrip("_")


class PublicNames(GenerateJsonSchema):
    """Refers to classes by their public names."""

    def normalize_name(self, name: str) -> str:
        return super().normalize_name(name.lstrip("_"))


class _Model(BaseModel):
    """Exact: "1" is no number, 1 is no boolean, and no name goes unread."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, model_title_generator=public)

    @model_validator(mode="before")
    @classmethod
    def _first_unknown_field(cls, given: Any) -> Any:
        """Keep only the first of many unknown names, to be refused."""
        if not isinstance(given, dict) or len(given) <= len(cls.model_fields):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(name for name in given if name not in known)
        return {name: content for name, content in given.items() if name in known or name == unknown}


# ---- messages ----------------------------------------------------------------------------------


class _TextPart(_Model):
    """Some text of a message."""

    type: Literal["text"]
    text: str


class RefusalPart(_Model):
    """A refusal: an assistant said it instead of an answer."""

    type: Literal["refusal"]
    refusal: str


class _CalculatorPart(_Model):
    """A call of the built-in calculator, or its result: how an answer of this server can be sent back whole."""

    type: Literal["tool", "output"]
    text: str


AssistantPart = Annotated[_TextPart | RefusalPart | _CalculatorPart, Field(discriminator="type")]
Parts = Annotated[list[Annotated[_TextPart, Field()]], Field(min_length=1, fail_fast=True)]


class _CalledFunction(_Model):
    """Name and arguments; the arguments are JSON in a string."""

    name: ToolName
    arguments: str


class ToolCall(_Model):
    """A call in an earlier answer; `index` is what a streaming client leaves behind."""

    id: Text
    type: Literal["function"] = "function"
    function: _CalledFunction
    index: int | None = None


class _SystemMessage(_Model):
    """Instructions for the assistant; the newer role `developer` means the same."""

    role: Literal["system", "developer"]
    content: str | Parts
    name: str | None = None


class _UserMessage(_Model):
    """The words of a person."""

    role: Literal["user"]
    content: str | Parts
    name: str | None = None


class AssistantMessage(_Model):
    """An earlier answer, as this server gave it."""

    role: Literal["assistant"]
    content: str | Listed[AssistantPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    annotations: list[Any] | None = None
    ascendchat: dict[str, Any] | None = None
    audio: None = None
    function_call: None = None


class ToolMessage(_Model):
    """The result of a call."""

    role: Literal["tool"]
    content: str | Parts
    tool_call_id: Text
    name: str | None = None


Message = Annotated[_SystemMessage | _UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


# ---- tools and formats -------------------------------------------------------------------------


class Function(_Model):
    """A function that the client runs."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Model):
    """A tool; its arguments fit the schema whether `strict` or not."""

    type: Literal["function"]
    function: Function


class _ChosenFunction(_Model):
    """The tool that must be called."""

    name: ToolName


class ChosenTool(_Model):
    """A call of this tool."""

    type: Literal["function"]
    function: _ChosenFunction


ToolChoice = Literal["none", "auto", "required"] | ChosenTool


class _TextFormat(_Model):
    """No limits."""

    type: Literal["text"]


class _JsonObjectFormat(_Model):
    """Some JSON object."""

    type: Literal["json_object"]


class _JsonSchema(_Model):
    """A schema with its name; the answer fits it whether `strict` or not."""

    name: ToolName
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class _JsonSchemaFormat(_Model):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: _JsonSchema


ResponseFormat = Annotated[_TextFormat | _JsonObjectFormat | _JsonSchemaFormat, Field(discriminator="type")]


class _StreamOptions(_Model):
    """`include_usage`: a last chunk counts the tokens."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


# ---- requests ----------------------------------------------------------------------------------


class SamplingFields(_Model):
    """Sampling and form of the answer: the fields that chat and text completions share."""

    model: str | None = Field(None, description="the served model; there is one")
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4, fail_fast=True)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, StringConstraints(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            at_most(MAX_BIASES, "logit_bias"),
        ]
        | None
    ) = None
    user: Label | None = None
    # vLLM's
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1, description="0 and -1: all tokens")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[Salt | None, Field(description="only prompts of the same one share the prefix cache")] = None
    return_token_ids: bool | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for stream: true")
        return self


class TemplateOptions(_Model):
    """Variables of a Hugging Face model's chat template."""

    enable_thinking: bool | None = None


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions"""

    chat_template_kwargs: TemplateOptions | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOPS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # harmless
    metadata: Metadata | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1, fail_fast=True)] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    # not supported
    audio: None = None
    functions: None = None
    function_call: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None

    @model_validator(mode="after")
    def _fields_fit_each_other(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only for logprobs: true")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice is only for tools")
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise ValueError("tools: two have the same name")
        if isinstance(self.tool_choice, ChosenTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: there is no tool {self.tool_choice.function.name}")
        return self


Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]  # the first error is enough of a long list
Prompts = (
    str
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | Ids
    | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
)


class CompletionRequest(SamplingFields):
    """POST /v1/completions; a text gets what its tokenizer puts before texts, token ids are taken as they are."""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOPS)] | None = None
    processed_logprobs: Annotated[bool, Field(description="ours: after temperature, top-k and the like")] = False
    add_special_tokens: bool = True
    return_tokens_as_token_ids: Annotated[bool, Field(description="log-probabilities name tokens token_id:7")] = False
    calculator: Annotated[bool, Field(description="ours: run the calls of a chat model, as by default")] | None = None
    keep_stop: Annotated[bool, Field(description="ours: a token that ends the answer is the last of its ids")] = False
    # not supported, unless it changes nothing
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None


class TokenizeRequest(_Model):
    """POST /tokenize: a text, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateOptions | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages is needed, not both")
        return self


class DetokenizeRequest(_Model):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


# ---- the Responses API: chat completions in another form -----------------------------------------
# Nothing is stored: a client sends the whole conversation with every request, and `store: true`, `previous_response_id`
# and `conversation` are refused.


class _InputText(_Model):
    """Some text of a message, a client's or an earlier answer's."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(_Model):
    """A message; an earlier answer may be sent back as it came."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Listed[_InputText]
    id: str | None = None
    status: str | None = None


class _InputCall(_Model):
    """An earlier call of a tool."""

    type: Literal["function_call"]
    call_id: Text
    name: ToolName
    arguments: str
    id: str | None = None
    status: str | None = None


class InputCallOutput(_Model):
    """Its result."""

    type: Literal["function_call_output"]
    call_id: Text
    output: str
    id: str | None = None
    status: str | None = None


def with_type(item: Any) -> Any:
    """Take an item that names no type for a message."""
    return {"type": "message", **item} if isinstance(item, dict) else item


InputItem = Annotated[
    InputMessage | _InputCall | InputCallOutput, Field(discriminator="type"), BeforeValidator(with_type)
]


class _FunctionTool(_Model):
    """A function that the client runs."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunctionTool(_Model):
    """The tool that must be called."""

    type: Literal["function"]
    name: ToolName


class _JsonObject(_Model):
    """Some JSON object."""

    type: Literal["json_object"]


class JsonSchemaText(_Model):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    name: ToolName
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class _TextOptions(_Model):
    """The form of the text."""

    format: Annotated[_TextFormat | _JsonObject | JsonSchemaText, Field(discriminator="type")] | None = None
    verbosity: None = None


class ResponsesRequest(_Model):
    """POST /v1/responses"""

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    text: _TextOptions | None = None
    tools: Annotated[list[_FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    cache_salt: Salt | None = None
    # harmless
    metadata: Metadata | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    include: Annotated[list[str], Field(max_length=0, fail_fast=True)] | None = None
    top_logprobs: Literal[0] | None = None
    # not supported
    conversation: None = None
    max_tool_calls: None = None
    previous_response_id: None = None
    prompt: None = None
    reasoning: None = None
    stream_options: None = None
