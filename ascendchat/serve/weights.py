"""Routes by which a trainer pauses the server and replaces its weights: `ascendchat serve --weight-updates`.

    POST /pause?mode=abort|wait|keep        answers under way: end as they are, are finished, or go on after /resume
    POST /update_weights                    {"folder": CHECKPOINT, "version": 7}, or a safetensors file as
                                            application/octet-stream with ?version=7
    POST /resume    GET /is_paused    GET /weights

All workers take new weights, or none. Without a pause answers under way are finished by the old ones. The server keeps
files of its own (links where it can) of the weights it uses, so that a worker that dies gets them again.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ascendchat.errors import UserError
from ascendchat.serve.errors import ApiError
from ascendchat.serve.guard import BODY
from ascendchat.serve.pool import AnswerFailed, WorkerPool

if TYPE_CHECKING:  # app.py includes these routes
    from ascendchat.serve.service import Service

NEEDED = ("manifest.json", "state.json", "model.safetensors")  # of a checkpoint
NAME = "ascendchat-weights-"  # of the folder for them, with the number of the server's process
BYTES_PER_PARAMETER = 8  # of an upload at most, and some for its header
HEADER = 1 << 24


def routes(service: Service) -> APIRouter:
    """The routes; only with --weight-updates."""
    router, pool, store = APIRouter(), service.pool, _Store()

    @router.post("/pause")
    async def pause(mode: str = "abort") -> JSONResponse:
        if mode not in ("abort", "wait", "keep"):
            return refusal(f"mode must be abort, wait or keep, not {mode!r}")
        await pool.pause(mode)  # type: ignore[arg-type]
        return JSONResponse({"status": "paused", "mode": mode})

    @router.post("/resume")
    async def resume() -> JSONResponse:
        await pool.resume()
        return JSONResponse({"status": "resumed"})

    @router.get("/is_paused")
    async def is_paused() -> JSONResponse:
        return JSONResponse({"is_paused": pool.paused is not None})

    @router.get("/weights")
    async def weights() -> JSONResponse:
        return JSONResponse(state(pool))

    @router.post("/update_weights")
    async def update_weights(request: Request) -> Response:
        source = None
        try:
            source, version = await receive(request, pool, store)
            await pool.load(str(source), version)
        except UserError as error:
            store.drop(source)
            return refusal(str(error))
        except AnswerFailed as failure:
            store.drop(source)
            return ApiError.of(failure).response()
        store.keep(source)
        return JSONResponse({"status": "loaded", **state(pool)})

    return router


def state(pool: WorkerPool) -> dict[str, Any]:
    """The state of the weights that answer. The checksum is that of all workers; a worker that starts anew has none
    yet."""
    workers = [
        {
            "index": process.index,
            "device": process.ready.device if process.ready else None,
            "version": (process.loaded.version if process.loaded else 0) if process.ready else None,
            "checksum": process.checksum if process.ready else None,
        }
        for process in pool.processes
    ]
    checksums = sorted({str(worker["checksum"]) for worker in workers if worker["checksum"]})
    return {
        "version": pool.version,
        "checksum": checksums[0] if len(checksums) == 1 else None,
        "dtypes": next((ready.dtypes for ready in pool.ready), {}),
        "workers": workers,
    }


def refusal(reason: str) -> JSONResponse:
    """The error envelope of the API."""
    error = {"message": reason, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, 400)


async def receive(request: Request, pool: WorkerPool, store: _Store) -> tuple[Path, int]:
    """Take the weights of a request into files of our own; these, and their version."""
    if request.headers.get("content-type", "").partition(";")[0].strip() == "application/octet-stream":
        version = version_of(request.query_params.get("version"))
        most = max([ready.parameters for ready in pool.ready], default=0) * BYTES_PER_PARAMETER + HEADER
        return await store.write(request.stream(), most), version
    try:
        body = json.loads(request.scope[BODY])
        folder, version = body["folder"], version_of(body.get("version"))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            'send {"folder": CHECKPOINT, "version": NUMBER} as JSON, or a safetensors file as application/octet-stream'
        ) from None
    if not isinstance(folder, str) or not (Path(folder) / "manifest.json").is_file():
        raise UserError(f"{folder} is no checkpoint folder on the server: it has no manifest.json")
    return await asyncio.to_thread(store.link, Path(folder)), version


def version_of(value: Any) -> int:
    """Parse the version of weights."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number < 2**63 or isinstance(value, (bool, float)):  # engines keep them in 64 bits
        raise UserError(f"version must be a whole number from 0 to 2^63 - 1, found {value!r}")
    return number


class _Store:
    """A private folder with the weights in use; it goes with the server. What a server that was killed has left is
    removed by the next one."""

    def __init__(self) -> None:
        self.used: Path | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def place(self, name: str) -> Path:
        """Make a folder; a path for new files in it."""
        if self._folder is None:
            for old in Path(tempfile.gettempdir()).glob(f"{NAME}*-*"):
                number = old.name.removeprefix(NAME).partition("-")[0]
                if number.isdigit() and not alive(int(number)):
                    shutil.rmtree(old, ignore_errors=True)  # another user's stays
            self._folder = tempfile.TemporaryDirectory(prefix=f"{NAME}{os.getpid()}-")
        return Path(tempfile.mkdtemp(dir=self._folder.name)) / name

    def link(self, folder: Path) -> Path:
        """Link a checkpoint, which then stays though the trainer deletes it."""
        mine = self.place(folder.resolve().name)
        mine.mkdir()
        try:
            for name in NEEDED:
                try:
                    os.link(folder / name, mine / name)
                except OSError:  # another disk, or one without links
                    shutil.copyfile(folder / name, mine / name)
        except OSError as error:
            self.drop(mine)
            raise UserError(f"cannot read the checkpoint {folder}: {error.strerror}") from None
        return mine

    async def write(self, content: AsyncIterator[bytes], most: int) -> Path:
        """Write these bytes to a file as they come."""
        path, size = self.place("weights.safetensors"), 0
        try:
            with open(path, "wb") as file:
                async for chunk in content:
                    size += len(chunk)
                    if size > most:
                        raise UserError(f"more than {most} bytes are not the weights of this model")
                    file.write(chunk)
        except BaseException:
            self.drop(path)
            raise
        return path

    def drop(self, path: Path | None) -> None:
        """Remove files that are not used."""
        if path is not None:
            shutil.rmtree(path.parent, ignore_errors=True)

    def keep(self, path: Path) -> None:
        """Keep these files, which are in use now, and drop those before."""
        self.drop(self.used)
        self.used = path


def alive(number: int) -> bool:
    """True if there is such a process."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
