"""Work is drawn by whichever device is free, and stays with the device that drew a size first."""

import threading

import pytest

from tritongemm.tune.device_queue import DeviceQueue


def test_a_free_device_draws_the_next_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is slow with its size leaves the others to the next one."""
    monkeypatch.setattr(DeviceQueue, "EVEN_SECONDS", 0)
    queue = DeviceQueue[str, int](2)
    for size in ("a", "b", "c"):
        queue.put(size, 1)
    assert queue.draw(0) == ("a", [1]) and queue.draw(1) == ("b", [1])
    assert queue.draw(1) == ("c", [1]), "device 0 has not come back"


def test_a_device_that_starts_first_leaves_the_others_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had bound all sizes before the next was ready, and measured nearly all of them."""
    monkeypatch.setattr(DeviceQueue, "EVEN_SECONDS", 60)
    queue, drawn = DeviceQueue[str, int](2), list[object]()
    for size in ("a", "b", "c"):
        queue.put(size, 1)
    assert queue.draw(0) == ("a", [1])
    queue.put("a", 2)
    assert queue.draw(0) == ("a", [2]), "what it has bound it goes on with"
    waiting = threading.Thread(target=lambda: drawn.append(queue.draw(0)))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert queue.draw(1) == ("b", [1])
    waiting.join(10)
    assert drawn == [("c", [1])]


def test_a_device_that_does_not_come_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceQueue, "EVEN_SECONDS", 0.05)
    queue = DeviceQueue[str, int](2)
    for size in ("a", "b"):
        queue.put(size, 1)
    assert [queue.draw(0) for _ in range(2)] == [("a", [1]), ("b", [1])]


def test_a_size_stays_on_the_device_that_drew_it() -> None:
    queue = DeviceQueue[str, int](2)
    queue.put("a", 1)
    assert queue.draw(1) == ("a", [1])
    queue.put("a", 2)
    queue.put("b", 3)
    assert queue.draw(0) == ("b", [3]), "a is device 1's"
    assert queue.draw(1) == ("a", [2])


def test_what_can_wait_is_drawn_last() -> None:
    """Races are held while nothing waits to be screened."""
    queue = DeviceQueue[str, int]()
    queue.put("a", 10, later=True)
    queue.put("b", 20, later=True)
    queue.put("a", 11, later=True)
    queue.put("b", 1)
    queue.put("b", 2)
    assert queue.draw(0) == ("b", [1, 2])
    queue.put("c", 3)
    assert [queue.draw(0) for _ in range(3)] == [("c", [3]), ("a", [10, 11]), ("b", [20])]


def test_many_pieces_are_drawn_together_but_not_all() -> None:
    queue = DeviceQueue[str, int]()
    for piece in range(DeviceQueue.MOST_DRAWN + 3):
        queue.put("a", piece)
    drawn = [queue.draw(0) or ("", []) for _ in range(2)]
    assert [len(works) for _, works in drawn] == [DeviceQueue.MOST_DRAWN, 3]


def test_a_waiting_device_is_woken_and_a_closed_queue_ends_it() -> None:
    queue, drawn = DeviceQueue[str, int](), list[object]()

    def work() -> None:
        while (found := queue.draw(0)) is not None:
            drawn.append(found)

    thread = threading.Thread(target=work)
    thread.start()
    queue.put("a", 1)
    queue.close()
    thread.join(10)
    assert not thread.is_alive() and drawn == [("a", [1])], "what was queued before the end is done"


def test_an_abandoned_queue_gives_nothing_more() -> None:
    queue = DeviceQueue[str, int]()
    queue.put("a", 1)
    queue.put("b", 2, later=True)
    queue.close(abandon=True)
    assert queue.draw(0) is None
