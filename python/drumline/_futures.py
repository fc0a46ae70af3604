"""The end of a call, as a value that is there later."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any


class Future(concurrent.futures.Future[Any]):
    """The result of a call in the background, with the methods of Python's futures and of torch's."""

    def cancel(self) -> bool:
        """Does nothing: other ranks take part in the call, which goes on."""
        return False

    def wait(self) -> Any:
        """Waits for the end; the value, or raises the error."""
        return self.result()

    def value(self) -> Any:
        """The value of a future that is `done`."""
        if not self.done():
            raise RuntimeError("the call has not ended yet: wait() waits for it")
        return self.result()

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """Calls ``callback`` with this future at the end. Returns the future of what it returns."""
        following = Future()

        def follow(ended: concurrent.futures.Future[Any]) -> None:
            try:
                following.set_result(callback(self))
            except Exception as error:
                following.set_exception(error)

        self.add_done_callback(follow)
        return following
