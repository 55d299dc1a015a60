"""Makes the event that is logged of a served request. A pure function of values."""

from collections.abc import Sequence

from onlinerl.rollout_store.schema import Completion, InteractionEvent
from onlinerl.rollout_store.trainability import prompt_fault
from onlinerl.serving.capture.eligibility import untrainable_reason
from onlinerl.serving.interaction.exchange import Exchange


def event_of(
    exchange: Exchange,
    choices: Sequence[Completion],
    *,
    first_token_at: float | None,
    last_token_at: float | None,
) -> InteractionEvent:
    """The event of a request and its completions.

    Args:
        exchange: The request.
        choices: The completions as sampled; nothing is padded or repaired.
        first_token_at: When the first token came, of `time.monotonic`; None when there was none, or
            when the time is not known.
        last_token_at: When the last token came, of `time.monotonic`; None when there was none.
    """
    lineage = exchange.lineage
    broken_prompt = prompt_fault(
        num_prompt_tokens=len(exchange.prompt_ids) - lineage.prefix_length,
        prefix_length=lineage.prefix_length,
        parent_id=lineage.parent_id,
    )
    reason = (
        broken_prompt.text
        if broken_prompt is not None
        else untrainable_reason(
            choices,
            policy=exchange.policy,
            sampling=exchange.sampling,
            constrained=exchange.grammar is not None,
            arm=exchange.arm,
        )
    )
    return InteractionEvent(
        interaction_id=exchange.interaction_id,
        session_id=lineage.session_id,
        parent_id=lineage.parent_id,
        parent_choice=lineage.parent_choice,
        prefix_length=lineage.prefix_length,
        prompt_token_ids=list(exchange.prompt_ids[lineage.prefix_length :]),
        policy=exchange.policy,
        arm=exchange.arm,
        arm_probability=exchange.arm_probability,
        protocol=exchange.request.protocol,
        streamed=exchange.request.stream,
        sampling=exchange.sampling,
        renderer=exchange.renderer,
        tenant=exchange.caller.tenant,
        user=exchange.user,
        consent=exchange.consent,
        trainable=reason is None,
        untrainable_reason=reason,
        served_at=exchange.served_at,
        ttft_ms=exchange.since_start_ms(first_token_at),
        latency_ms=exchange.since_start_ms(last_token_at),
        tags=dict(exchange.request.tags),
        choices=list(choices),
    )
