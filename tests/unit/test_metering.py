"""datastore.metering: from samples to peak and mean."""

from __future__ import annotations

import json

import pytest

from datastore.metering import Figure, Meter, Sample, load, together
from tests.promises import promise


@promise("S-334")
def test_peak_and_mean_are_over_time() -> None:
    meter = Meter()
    assert meter.usage() is None
    for at_s, cpu_s, memory, received in ((0, 0.0, 100, 0), (1, 2.0, 300, 1000), (4, 2.0, 100, 4000)):
        sample = Sample(at_s=at_s, cpu_s=cpu_s, memory_bytes=memory, received_bytes=received, sent_bytes=0)
        meter.add(sample)
    found = meter.usage()
    assert found is not None
    assert (found.cpu.peak, found.cpu.mean, found.cpu_seconds) == (2.0, 0.5, 2.0)
    assert (found.memory.peak, found.memory.mean) == (300, 150)
    assert found.received is not None
    assert (found.received.peak, found.received.mean, found.received_bytes) == (1000, 1000, 4000)
    assert found.gpu is None
    assert meter.now["received"] == 1000


def metered(*cpu_s: float) -> Meter:
    meter = Meter()
    for at_s, each in enumerate(cpu_s):
        meter.add(Sample(at_s=at_s, cpu_s=each, memory_bytes=100 * (at_s + 1), received_bytes=at_s, gpu_percent=50.0))
    return meter


@promise("S-359")
def test_what_was_measured_survives_as_json() -> None:
    meter = metered(0.0, 1.5, 1.5)
    again = load(json.loads(json.dumps(meter.dump())))
    assert (again.usage(), again.now) == (meter.usage(), meter.now)
    again.add(Sample(at_s=3, cpu_s=5.5, memory_bytes=1, received_bytes=2))
    assert again.now["cpu"] == 4.0
    assert load({}).usage() is None


@promise("S-334", "S-359")
def test_no_mean_is_larger_than_its_peak() -> None:
    """What never changed has one value, though seconds are rounded on their way and sums of floats are not exact."""
    meter, steady = Meter(), 216_555_520
    for at_s in (0.0, 1.0004, 2.0009, 3.0011, 4.3004):
        meter.add(Sample(at_s=at_s, cpu_s=at_s, memory_bytes=steady, gpu_percent=33.3333))
    one = load(json.loads(json.dumps(meter.dump())))
    for each in (meter, one, together([one, one, one])):
        found = each.usage()
        assert found is not None
        assert found.memory == Figure(peak=steady, mean=steady)
        assert found.gpu is not None
        assert found.cpu.peak >= found.cpu.mean
        assert found.gpu.peak >= found.gpu.mean


@promise("S-359")
@pytest.mark.parametrize(
    "wrong", [{"last": [1]}, {"last": 3}, [], {"last": [0] * 7, "cpu": 1}, {"last": [0] * 7, "cpu": [1]}]
)
def test_edited_figures_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="figures"):
        load(wrong)  # type: ignore[arg-type]


@promise("S-359")
def test_the_starts_of_a_replica_count_together() -> None:
    """The mean is over the time of both, the peak that of either."""
    found = together([metered(0.0, 2.0), metered(0.0, 0.0, 0.0, 1.0)]).usage()
    assert found is not None
    assert (found.cpu.peak, found.cpu.mean, found.cpu_seconds) == (2.0, 0.75, 3.0)
    assert (found.memory.peak, found.received_bytes, found.sent_bytes) == (400, 4, None)
