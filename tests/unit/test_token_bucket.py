"""A rate with a burst: golden values worked by hand."""

from swarm.limits.bounded_maps import BoundedMap, ExpiringKeys
from swarm.limits.token_bucket import PeerBuckets, TokenBucket


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


def test_whoever_goes_on_after_a_bucket_was_drained_gets_nothing_until_it_pauses() -> None:
    bucket = TokenBucket(per_s=1.0, burst=2.0, now=0.0)
    assert bucket.try_take(1, 0.0) and bucket.try_take(1, 0.0)
    for tenth in range(1, 30):
        assert not bucket.try_take(1, tenth / 10)
        bucket.drain()
    assert bucket.try_take(1, 3.9), "one second after the last attempt"


def test_a_clock_that_was_set_back_adds_nothing() -> None:
    bucket = TokenBucket(per_s=1.0, burst=1.0, now=100.0)
    assert bucket.try_take(1, 100.0)
    assert not bucket.try_take(1, 50.0) and not bucket.try_take(1, 50.9)
    assert bucket.try_take(1, 51.0)


def test_each_peer_has_a_bucket_and_the_one_that_took_longest_ago_is_forgotten() -> None:
    buckets = PeerBuckets(per_s=1.0, burst=1.0, max_peers=2)
    for peer_id in ("a", "b", "a"):
        buckets.of(peer_id, 0.0).take(1, 0.0)
    assert (buckets.wait_s("a", 0.0), buckets.wait_s("b", 0.0), buckets.wait_s("c", 0.0)) == (1.0, 0.0, 0.0)
    assert len(buckets) == 2, "asking leaves no trace"
    buckets.of("c", 0.0)
    assert len(buckets) == 2 and buckets.wait_s("a", 0.0) == 1.0
    assert buckets.of("b", 0.0).try_take(1, 0.0), "it begins with a full bucket again"


def test_a_map_of_the_latest_entries_drops_the_one_put_longest_ago() -> None:
    latest: BoundedMap[str, int] = BoundedMap(2)
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        latest[key] = value
    assert list(latest.items()) == [("a", 3), ("c", 4)] and "b" not in latest and latest.get("b") is None
    latest.drop_oldest_while(lambda value: value < 4)
    assert list(latest) == ["c"] and latest.pop("c") == 4 and len(latest) == 0
    latest.drop_oldest_while(lambda value: True)


def test_keys_that_are_alive_are_counted_without_those_that_expired() -> None:
    now = [0.0]
    keys: ExpiringKeys[str] = ExpiringKeys(lambda: now[0], 8)
    keys.add("a", 1.0)
    keys.add("b", 2.0)
    now[0] = 1.5
    assert (keys.num_alive(), len(keys)) == (1, 2)
