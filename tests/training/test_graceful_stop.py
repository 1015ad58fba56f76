"""Which signals a training hears: those that it was not told to ignore."""

import os
import signal

from perl.training.callbacks.graceful_stop import GracefulStop


def test_a_signal_that_was_ignored_at_the_start_does_not_stop_a_training():
    """As a shell without a terminal starts ``perl train R &``."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stop = GracefulStop()
        with stop.listening():
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop.requested
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
