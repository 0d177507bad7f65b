"""One answer of a Fleet as it comes: `fleet.stream(request)`. Until its first piece it may be asked elsewhere."""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from ascendchat.config import UserError
from ascendchat.engine.request import Completion, Piece, Request

if TYPE_CHECKING:
    from ascendchat.remote.fleet import Fleet

MOST_ATTEMPTS = 12  # servers that may fail before it is given up


class FleetStream:
    """The generator.Stream of one request."""

    def __init__(self, fleet: Fleet, request: Request) -> None:
        self._fleet, self._request = fleet, request
        self._attempts, self._read, self._counted = 0, False, False
        self._begin()

    def _begin(self) -> None:
        self._attempts += 1
        self._member, remote = self._fleet.take([self._request])
        self._remote, self._counted = remote, True
        self._stream = remote.stream(self._request)

    @property
    def completion(self) -> Completion:
        return self._stream.completion

    def __iter__(self) -> FleetStream:
        return self

    def __next__(self) -> Piece:
        while True:
            try:
                piece = next(self._stream)
            except (UserError, OSError, CancelledError) as error:
                self._end()
                self._fleet.lose(self._member, self._remote, str(error) or "the connection was closed")
                if self._read or self._attempts == MOST_ATTEMPTS:
                    raise
                self._begin()
            except BaseException:
                self._end()
                raise
            else:
                self._read = True
                return piece

    def _end(self) -> None:
        """It no longer counts as under way there."""
        if self._counted:
            self._counted = False
            self._fleet.give(self._member, 1)

    def close(self) -> None:
        self._stream.close()
        self._end()
