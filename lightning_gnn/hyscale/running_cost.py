"""What one trainer or stage costs, learned measurement by measurement, and how a change of it is told from noise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from math import sqrt
from typing import Any

LEAST_SLOPE = 0.25
"""Of a time, at least this part is counted as growing with the units of work: noise may say otherwise."""
_OVERHEAD = 0.3
"""How large an overhead is expected, as a part of the first time; what was measured soon outweighs it."""
_NOISE, _LEAST_NOISE = 0.07, 0.01
"""Relative standard deviation of a measured time: expected, and at least."""
_NOISE_MEMORY = 60
_CLIP = 3.0
"""A measurement counts as off by at most so many standard deviations: an outlier must not decide anything."""
_ODD = 1.6
"""Of the first three measurements, one that is off from the middle by more than this factor counts as the middle."""
_SLACK, _ALARM = 0.75, 9.0
"""Of the sums that tell a change, in standard deviations: what is taken off each time, and the sum that counts."""
_INHERITED = 4.0


@dataclass(slots=True)
class RunningCost:
    """Time as ``overhead + per_unit * units``: a recursive fit with equal relative errors, and a detector of changes.

    Bayesian least squares of the time per unit: the overhead is expected to be 0, give or take 0.3 of the time, so
    that it is told from the cost of a unit only by measurements of different amounts of work. The noise comes from
    the differences of measurements that follow one another. A change is told by two cumulative sums of the deviations
    from the prediction (Page's test), one for slower and one for faster, so that a large one shows after five
    measurements and a small one as soon as noise allows.

    Args:
        memory: Older measurements fade out exponentially, over this many; they weigh as much as twice that number.
        has_overhead: Whether there may be an overhead; if not, time is proportional to units.
    """

    memory: int
    has_overhead: bool = True
    count: int = 0
    """Measurements since it began or changed."""
    overhead: float = 0.0
    per_unit: float = 0.0
    variance: float = _NOISE**2
    """Of the noise, relative."""
    _differences: int = 0
    _units: float = 0.0
    _rate: float = 0.0
    _first: float = 0.0
    _first_units: float = 0.0
    _weight: float = 0.0
    _inverse: float = 0.0
    _inverse_squared: float = 0.0
    _rates: float = 0.0
    _product: float = 0.0
    _slower: float = 0.0
    _slower_since: int = 0
    _faster: float = 0.0
    _faster_since: int = 0

    def seconds(self, units: float) -> float:
        """Return the time for some units of work."""
        return self.overhead + self.per_unit * units

    def error(self, units: float) -> float:
        """Return the relative standard error of :meth:`seconds`."""
        return sqrt(self.variance * self._uncertainty(1 / units, self.seconds(units) / units))

    def add(self, units: float, seconds: float) -> int:
        """Take in a measurement.

        Args:
            units: Units of work, more than 0.
            seconds: Their time, more than 0.

        Returns:
            0, or since how many measurements the cost is another one: then go on with :meth:`restarted` of those.
        """
        rate, inverse = seconds / units, 1 / units
        if not self._weight:
            self._first, self._first_units = seconds, units
            self._learn(inverse, rate, rate)
            self._units, self._rate = units, rate
            return 0
        expected = self.per_unit + self.overhead * inverse
        if self.count == 2 and units == self._units == self._first_units:
            rate, expected = self._begin_robustly(self._first / units, self._rate, rate), self.per_unit
        elif units == self._units:
            self._learn_noise((rate - self._rate) / expected)
        self._units, self._rate = units, rate
        deviation = sqrt(self.variance * (1 + self._uncertainty(inverse, expected)))
        off = (rate / expected - 1) / deviation
        if off > _CLIP or off < -_CLIP:
            off = _CLIP if off > 0 else -_CLIP
            if self.count >= 2:
                rate = expected * max(0.1, 1 + off * deviation)
        self._learn(inverse, rate, expected)
        return self._changed_since(off)

    def restarted(self, measurements: Iterable[tuple[float, float]]) -> RunningCost:
        """Return one that knows the given measurements only, units and seconds of each, and the noise."""
        fresh = RunningCost(self.memory, self.has_overhead, variance=self.variance, _differences=self._differences)
        for units, seconds in measurements:
            fresh.add(units, seconds)
        fresh._forget_deviations()
        return fresh

    def heir(self) -> RunningCost:
        """Return what begins with a weak memory of this one, for a cost that is likely, but not surely, the same."""
        heir = RunningCost(*self.state())
        factor = min(1.0, _INHERITED / max(1, self.count))
        heir._weight *= factor
        heir._inverse *= factor
        heir._inverse_squared *= factor
        heir._rates *= factor
        heir._product *= factor
        heir.count, heir._first_units = 0, 0.0
        heir._forget_deviations()
        return heir

    def state(self) -> list[Any]:
        """Return all it knows as plain numbers, the arguments for an equal one."""
        return list(astuple(self))

    def _uncertainty(self, inverse: float, expected: float) -> float:
        """Return the squared relative error of the prediction, in units of the noise's variance."""
        if not self.has_overhead:
            return 1 / (self._weight * expected * expected)
        ridge = self._inverse_squared + self.variance / (_OVERHEAD * self._first) ** 2
        determinant = self._weight * ridge - self._inverse * self._inverse
        squared = ridge - 2 * inverse * self._inverse + inverse * inverse * self._weight
        return max(0.0, squared / (determinant * expected * expected))

    def _begin_robustly(self, *rates: float) -> float:
        """Forget all but the middle of the first three rates, and those near it; return what the third counts as.

        The first measurements are often of another kind: memory is allocated, code is compiled.
        """
        middle = sorted(rates)[1]
        near = [rate if middle / _ODD < rate < middle * _ODD else middle for rate in rates]
        if near != list(rates):
            inverse, self._first = 1 / self._first_units, near[0] * self._first_units
            self._weight = self._rates = self._inverse = self._inverse_squared = self._product = 0.0
            self.count = 0
            self._forget_deviations()
            for rate in near[:2]:
                self._learn(inverse, rate, middle)
        else:
            self._learn_noise((rates[2] - rates[1]) / self.per_unit)
        return near[2]

    def _learn(self, inverse: float, rate: float, expected: float) -> None:
        self.count += 1
        keep = 1 - 1 / self.memory
        weight = 1 / (expected * expected)
        self._weight = self._weight * keep + weight
        self._rates = self._rates * keep + weight * rate
        if not self.has_overhead:
            self.per_unit = self._rates / self._weight
            return
        self._inverse = self._inverse * keep + weight * inverse
        self._inverse_squared = self._inverse_squared * keep + weight * inverse * inverse
        self._product = self._product * keep + weight * inverse * rate
        ridge = self._inverse_squared + self.variance / (_OVERHEAD * self._first) ** 2
        determinant = self._weight * ridge - self._inverse * self._inverse
        overhead = (self._weight * self._product - self._inverse * self._rates) / determinant
        if overhead <= 0:
            self.overhead, self.per_unit = 0.0, self._rates / self._weight
            return
        per_unit = (ridge * self._rates - self._inverse * self._product) / determinant
        whole = max(per_unit + overhead * inverse, LEAST_SLOPE * self._rates / self._weight)
        self.per_unit = max(per_unit, LEAST_SLOPE * whole)
        self.overhead = (whole - self.per_unit) / inverse

    def _learn_noise(self, difference: float) -> None:
        self._differences += 1
        found = 1.09 * min(difference * difference / 2, 4 * self.variance)
        part = 1 / min(self._differences + 4, _NOISE_MEMORY)
        self.variance = max(_LEAST_NOISE**2, self.variance + part * (found - self.variance))

    def _changed_since(self, off: float) -> int:
        self._slower = max(0.0, self._slower + off - _SLACK)
        self._slower_since = self._slower_since + 1 if self._slower else 0
        self._faster = max(0.0, self._faster - off - _SLACK)
        self._faster_since = self._faster_since + 1 if self._faster else 0
        if self._slower > _ALARM:
            return self._slower_since
        return self._faster_since if self._faster > _ALARM else 0

    def _forget_deviations(self) -> None:
        self._slower = self._faster = 0.0
        self._slower_since = self._faster_since = 0
