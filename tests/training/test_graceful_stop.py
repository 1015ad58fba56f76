"""Which signals a training hears: those that it was not told to ignore."""

import os
import signal
from types import SimpleNamespace

import pytest

from perl.run.host import Host, hosted_by
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


def test_the_first_signal_of_a_process_that_another_one_has_asked_to_stop_is_no_second_one():
    stop = GracefulStop()
    with stop.listening():
        stop.requested = True  # as all have agreed after a step in which another process had heard a signal
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_each_notice_that_a_node_goes_asks_for_one_checkpoint():
    class Leaving(Host):
        notices = iter([False, True, True, False, True])

        def leaves(self):
            return next(self.notices)

    stop, saved = GracefulStop(), []
    with hosted_by(Leaving()):
        for _ in range(5):
            control = SimpleNamespace(should_save=False, should_training_stop=False)
            stop.on_step_end(None, None, control)
            assert not control.should_training_stop
            saved.append(int(control.should_save))
    assert saved == [0, 1, 0, 0, 1]
