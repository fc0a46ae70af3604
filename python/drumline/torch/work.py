"""The result of a call, as torch's Work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from drumline import _core
from drumline.torch.tensors import Staging

_NO_LIMIT = timedelta(0)
_asked = threading.local()


# The failures of groups that programs have heard of last.
_heard: deque[str] = deque(maxlen=64)


def is_news(error: BaseException) -> bool:
    """Whether no call has told the program of this failure."""
    return not any(it in str(error) for it in _heard)


def as_dist_error(error: BaseException) -> BaseException:
    """The error as torch's class, with the same text."""
    _heard.append(str(error).partition("poisoned by an earlier failure: ")[2] or str(error))
    if isinstance(error, _core.StoreError):
        return dist.DistStoreError(str(error))
    if isinstance(error, _core.ConnectError):
        return dist.DistNetworkError(str(error))
    if isinstance(error, _core.CollectiveTimeoutError):
        # Programs for gloo look for the first words.
        text = str(error)
        for limit in _LIMITS:
            text = text.replace(limit, "timeout= of init_process_group or new_group is the limit")
        return dist.DistBackendError(f"drumline: Timed out waiting: {text}")
    if isinstance(error, _core.DrumlineError):
        return dist.DistBackendError(f"{error}{_if_one_has_a_gpu(str(error))}")
    return error


# What the core says of a time limit. torch gives every group one.
_LIMITS = (
    "this limit is the timeout that the program gives",
    "DRUMLINE_TIMEOUT_S is the limit where the program gives none",
)

# How a rank begins to use its GPU, see `drumline.torch.on_device`.
_BEGINS_ON_GPU = "all_reduce(min) of 1 u8"


def _if_one_has_a_gpu(text: str) -> str:
    """What to add where one rank has begun to use its GPU and another has made a call."""
    if "ranks disagree" not in text or _BEGINS_ON_GPU not in text:
        return ""
    return (
        f". With {_BEGINS_ON_GPU} a rank begins to use its GPU: in one collective all ranks pass tensors on "
        "GPUs, or none does"
    )


class DrumlineWork(dist.Work):
    """A call that has ended (no ``handles``) or runs in the background.

    torch gives programs a holder instead, which passes on ``wait`` and ``get_future`` only. The future
    is made on the first `get_future`.
    """

    def __init__(
        self,
        title: str,
        handles: list[Any],
        staging: Staging,
        result: list[torch.Tensor],
        as_error: Callable[[BaseException], BaseException] = as_dist_error,
    ) -> None:
        super().__init__()
        self._as_error = as_error
        self._title = title
        self._handles = handles
        self._staging = staging
        self._result = result
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        limit = timeout.total_seconds()
        for handle in self._handles:
            try:
                ended = handle.wait(limit if limit > 0 else None)
            except _core.DrumlineError as error:
                raise self._as_error(error) from None
            if not ended:
                raise dist.DistBackendError(
                    f"{self._title} has not ended within the {limit} s of wait(); it goes on, and "
                    "can be waited for again"
                )
        self._finish()
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        # No torch object may stay in a thread that Python has not started.
        if getattr(_asked, "wanted", False):
            _asked.work = self
        with _LOCK:
            if self._future is None:
                self._future = self._make_future()
            return self._future

    def _make_future(self) -> Future[Any]:
        # With devices, callbacks have streams of their own. The stream of a thread that waits for a
        # future waits for those streams.
        devices = self._staging.devices
        ended: Future[Any] = Future(devices=[*devices]) if devices else Future()
        error: BaseException | None = None

        # An exception set on a future is a value for C++, which takes it for tensors. One that is
        # raised in a callback is an error there, too.
        def result(_: Future[Any]) -> list[torch.Tensor]:
            if error is not None:
                raise self._as_error(error)
            self._finish()
            return self._result

        def tell(outcome: BaseException | None) -> None:
            nonlocal error
            error = outcome
            ended.set_result(None)

        future: Future[Any] = ended.then(result)
        when_all_ended(self._handles, tell)
        return future

    def _finish(self) -> None:
        if self._staging.is_idle:
            return
        with _LOCK:
            try:
                self._staging.finish()
            except _core.DrumlineError as error:
                raise self._as_error(error) from None

    def drop_tensors(self) -> bool:
        """Drops the result, if the call has ended and nothing needs to be copied back. Returns whether it has."""
        if not (self._staging.is_idle and all(handle.is_completed() for handle in self._handles)):
            return False
        for handle in self._handles:
            handle.error()  # the core keeps the memory of an ended call until it is asked
        self._result, self._future = [], None
        return True

    def is_completed(self) -> bool:
        if not all(handle.is_completed() for handle in self._handles):
            return False
        if self.exception() is None:
            self._finish()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        errors = (handle.error() for handle in self._handles)
        error = next((error for error in errors if error is not None), None)
        return None if error is None else self._as_error(error)

    def result(self) -> list[torch.Tensor]:
        return self._result

    def source_rank(self) -> int:
        try:
            source = self._handles[0].source() if self._handles else None
        except _core.DrumlineError as error:
            raise self._as_error(error) from None
        if source is None:
            raise RuntimeError(f"{self._title} has no source: it receives from no open rank")
        return source

    _source_rank = source_rank


# What one thread at a time does with Works. A handler of a signal may interrupt its thread.
_LOCK = threading.RLock()


def when_all_ended(
    handles: list[_core.Work], tell: Callable[[BaseException | None], None]
) -> None:
    """Calls ``tell`` with the first error, or None, when all have ended."""
    if not handles:
        return tell(None)
    if len(handles) == 1:
        return handles[0].then(tell)
    lock, left, first = threading.Lock(), [len(handles)], [None]

    def one(error: Any) -> None:
        with lock:
            left[0] -= 1
            first[0] = first[0] or error
            last = left[0] == 0
        if last:
            tell(first[0])

    for handle in handles:
        handle.then(one)


def patch_holder() -> None:
    """Makes torch's holder of a Work call our Work for methods that the holder does not pass on.

    The holder passes on ``get_future``, and our ``get_future`` stores the Work where the patched method
    finds it. Works of other backends behave as before.
    """
    for name in (
        "is_completed", "is_success", "exception", "result", "source_rank", "_source_rank",
    ):  # fmt: skip
        theirs = getattr(dist.Work, name)
        if not hasattr(theirs, "_drumline"):
            setattr(dist.Work, name, _asking_ours(name, theirs))


def _asking_ours(name: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: dist.Work, *args: Any) -> Any:
        if type(self) is not dist.Work:
            return theirs(self, *args)
        _asked.work, _asked.wanted = None, True
        try:
            self.get_future()
        except RuntimeError:  # another backend's, without futures
            pass
        finally:
            _asked.wanted = False
        work, _asked.work = _asked.work, None
        return theirs(self, *args) if work is None else getattr(work, name)(*args)

    method.__name__ = name
    method.__doc__ = theirs.__doc__
    method._drumline = True  # type: ignore[attr-defined]
    return method
