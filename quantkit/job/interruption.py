"""Writes that Ctrl-C does not cut in two: the signal is heard when they are done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

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
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    # What Python does not handle is ignored, or ends the process at once: both stay as they are.
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda *call: heard.append(call))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if heard:
        number, frame = heard[-1]
        handler = handlers[signal.Signals(number)]
        assert callable(handler)
        handler(number, frame)
