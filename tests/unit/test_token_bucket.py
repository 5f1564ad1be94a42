"""A rate with a burst: golden values worked by hand."""

from swarm.limits.token_bucket import TokenBucket


def test_burst_is_there_at_once_and_the_rate_fills_it_again() -> None:
    bucket = TokenBucket(per_s=2.0, burst=3.0, now=10.0)
    assert [bucket.try_take(1, 10.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.try_take(1, 10.4)
    assert bucket.try_take(1, 10.5)
    assert [bucket.try_take(1, 100.0) for _ in range(4)] == [True, True, True, False]


def test_overdrawn_bucket_tells_how_long_to_wait() -> None:
    bucket = TokenBucket(per_s=100.0, burst=50.0, now=0.0)
    assert bucket.take(50, 0.0) == 0.0
    assert bucket.take(200, 0.0) == 2.0
    assert bucket.wait_s(1.5) == 0.5
    assert bucket.wait_s(2.0) == 0.0
    assert not bucket.try_take(1, 2.0)


def test_rate_of_zero_is_no_limit() -> None:
    bucket = TokenBucket(per_s=0.0, burst=0.0, now=0.0)
    assert bucket.try_take(10**12, 0.0)
    assert (bucket.take(10**12, 0.0), bucket.wait_s(0.0)) == (0.0, 0.0)
