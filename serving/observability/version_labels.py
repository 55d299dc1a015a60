"""A label per policy version, with a bounded number of series.

The most recent versions have series of their own. The counts of older versions are moved to the
label `older`, so that sums over versions never go down.
"""

from collections import OrderedDict
from collections.abc import Sequence

from prometheus_client import Counter, Histogram

POLICY_VERSION = "policy_version"
OLDER = "older"


class VersionLabels:
    """Bounds the series of `counters` and `histograms`, whose last label is `policy_version`."""

    def __init__(
        self,
        *,
        counters: Sequence[Counter],
        histograms: Sequence[Histogram],
        max_versions: int,
    ) -> None:
        self._counters = counters
        self._histograms = histograms
        self._max_versions = max_versions
        self._recent: OrderedDict[str, None] = OrderedDict()

    def of(self, version: str) -> str:
        """The label of a version; it becomes the most recent one."""
        self._recent[version] = None
        self._recent.move_to_end(version)
        while len(self._recent) > self._max_versions:
            self._fold(self._recent.popitem(last=False)[0])
        return version

    def _fold(self, version: str) -> None:
        for counter in self._counters:
            for labels in _labels_of(counter, version):
                # A child has no public way to read it, and collecting a family copies all of it.
                value = counter.labels(*labels, version)._value.get()
                counter.labels(*labels, OLDER).inc(value)
                counter.remove(*labels, version)
        for histogram in self._histograms:
            for labels in _labels_of(histogram, version):
                _add(histogram.labels(*labels, version), histogram.labels(*labels, OLDER))
                histogram.remove(*labels, version)


def _labels_of(family: Counter | Histogram, version: str) -> list[tuple[str, ...]]:
    """The other labels of every series of a version."""
    return [tuple(labels[:-1]) for labels in list(family._metrics) if labels[-1] == version]


def _add(one: Histogram, other: Histogram) -> None:
    for bucket, target in zip(one._buckets, other._buckets, strict=True):
        target.inc(bucket.get())
    other._sum.inc(one._sum.get())
