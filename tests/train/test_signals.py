import os
import signal
import threading

import pytest

from maglev.train.signals import Interruption, interruption


def test_the_first_signal_is_kept_and_handlers_are_put_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with interruption() as noted:
        os.kill(os.getpid(), signal.SIGINT)
        assert noted.signal == signal.SIGINT
        os.kill(os.getpid(), signal.SIGTERM)
        assert noted.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert {number: signal.getsignal(number) for number in before} == before


def test_another_thread_than_the_main_one_gets_no_handlers() -> None:
    found: list[Interruption] = []

    def work() -> None:
        with interruption() as noted:
            found.append(noted)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0].signal == 0 and signal.getsignal(signal.SIGINT) == before
