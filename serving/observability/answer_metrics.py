"""Metrics of answers: how they ended, how many tokens they had, how long they took."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram

from onlinerl.serving.observability.version_labels import POLICY_VERSION, VersionLabels

MAX_VERSIONS = 16
"""Policy versions with series of their own."""
_FINE_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 5.0)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class AnswerMetrics:
    """Metrics of answers, in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.completions = Counter(
            "onlinerl_gateway_answers",
            "Completions that ended, by finish reason.",
            ("finish_reason", POLICY_VERSION),
            registry=registry,
        )
        self.tokens = Counter(
            "onlinerl_gateway_tokens",
            "Tokens of served requests; kind is prompt or completion.",
            ("kind", POLICY_VERSION),
            registry=registry,
        )
        self.untrainable = Counter(
            "onlinerl_gateway_untrainable",
            "Interactions that are logged but cannot be learned from.",
            registry=registry,
        )
        self.extended = Counter(
            "onlinerl_gateway_extended",
            "Prompts with earlier turns, by whether they extend known tokens: yes or no.",
            ("known",),
            registry=registry,
        )
        self.unparsed_calls = Counter(
            "onlinerl_gateway_unparsed_calls",
            "Answers whose calls the family's parser could not read; they are shown as text.",
            registry=registry,
        )
        self._times = _TimeMetrics(registry)
        self._versions = VersionLabels(
            counters=(self.completions, self.tokens),
            histograms=self._times.all,
            max_versions=MAX_VERSIONS,
        )

    def count(
        self,
        *,
        policy_version: str,
        num_prompt_tokens: int,
        choices: Iterable[tuple[str, int]],
    ) -> None:
        """Count an answer that has ended.

        Args:
            policy_version: Version that sampled its first token.
            num_prompt_tokens: Tokens of its prompt.
            choices: Finish reason and number of tokens of every completion.
        """
        version = self._versions.of(policy_version)
        self.tokens.labels("prompt", version).inc(num_prompt_tokens)
        for finish_reason, num_tokens in choices:
            self.tokens.labels("completion", version).inc(num_tokens)
            self.completions.labels(finish_reason, version).inc()

    def observe_times(
        self,
        *,
        policy_version: str,
        ttft_s: float | None,
        latency_s: float,
        num_tokens: int,
        overhead_s: float | None = None,
    ) -> None:
        """Observe how long an answer with at least one token took.

        Args:
            policy_version: Version that sampled its first token.
            ttft_s: Seconds from arrival to first token; None for an answer that came whole.
            latency_s: Seconds from arrival to last token.
            num_tokens: Tokens of its longest completion.
            overhead_s: Seconds that were not spent waiting for the engine; None if not known.
        """
        version = self._versions.of(policy_version)
        self._times.latency.labels(version).observe(latency_s)
        if ttft_s is not None:
            self._times.ttft.labels(version).observe(ttft_s)
        if ttft_s is not None and num_tokens > 1:
            self._times.inter_token.labels(version).observe((latency_s - ttft_s) / (num_tokens - 1))
        if overhead_s is not None:
            self._times.overhead.labels(version).observe(max(overhead_s, 0.0))


class _TimeMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.ttft = Histogram(
            "onlinerl_gateway_ttft_seconds",
            "Arrival to first token.",
            (POLICY_VERSION,),
            buckets=_SECONDS,
            registry=registry,
        )
        self.latency = Histogram(
            "onlinerl_gateway_latency_seconds",
            "Arrival to last token.",
            (POLICY_VERSION,),
            buckets=_SECONDS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "onlinerl_gateway_inter_token_seconds",
            "Mean time between two tokens of a completion; completions of one token do not count.",
            (POLICY_VERSION,),
            buckets=_FINE_SECONDS,
            registry=registry,
        )
        self.overhead = Histogram(
            "onlinerl_gateway_overhead_seconds",
            "Time of a request that was not spent waiting for the engine.",
            (POLICY_VERSION,),
            buckets=_FINE_SECONDS,
            registry=registry,
        )
        self.all = (self.ttft, self.latency, self.inter_token, self.overhead)
