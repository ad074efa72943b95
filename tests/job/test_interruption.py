"""Ctrl-C waits for a write, not longer."""

import os
import signal
import threading

import pytest

from quantkit.job.interruption import uninterrupted


@pytest.fixture(autouse=True)
def heard():
    """Ctrl-C acts as in a terminal: the suite itself may run where it is ignored, as a shell's background job."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_signal_is_heard_when_the_block_ends() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("first")
        os.kill(os.getpid(), signal.SIGINT)
        done.append("second")
    assert done == ["first", "second"]
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_an_error_comes_out_even_if_a_signal_was_heard() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError
    assert signal.getsignal(signal.SIGINT) is before


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_hear_no_signals() -> None:
    done = []

    def work() -> None:
        with uninterrupted():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
