"""Writes that Ctrl-C does not cut in two: the signal is heard when they are done."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds back the signals that end a program until the block is left, and lets the last one act then.

    Only the main thread hears signals: in another one nothing has to be held back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
    for number in SIGNALS:
        handler = signal.getsignal(number)
        # What Python does not handle is ignored, or ends the process at once: both stay as they are.
        if callable(handler):
            handlers[number] = handler
            signal.signal(number, lambda *call: heard.append(call))
    try:
        yield
    finally:
        for held, own in handlers.items():
            signal.signal(held, own)
    if heard:
        last, frame = heard[-1]
        handlers[last](last, frame)
