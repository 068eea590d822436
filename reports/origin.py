"""Where the results of one record file come from, when not from one run: resumed runs, shards, joined shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reports.records import Records


def origin(records: Records) -> Iterator[str]:
    """Sentences that a reader must see beside the verdict; none for an ordinary run."""
    run = records.run
    planned = sum(run.planned.values())
    for earlier in run.resumed:
        text = f"resumed: {earlier.get('results')} of {planned} results are from {earlier.get('from')}"
        text += f" (started {earlier.get('started')})"
        yield text + but(earlier, "that run differs in")
    if run.shard is not None:
        whole = run.shard.get("whole", {}).get("planned") or run.planned
        yield (
            f"shard {run.shard.get('index')} of {run.shard.get('count')} only: {planned} of "
            f"{sum(whole.values())} planned results; every shard repeats {len(run.shard.get('identity', ()))}"
            + (f"; split by recorded seconds of {run.shard.get('known')} results" if run.shard.get("costs") else "")
        )
    if run.merged is not None:
        agree = run.merged.get("agree")
        said = "agree in state, level and numbers" if agree else "do NOT agree"
        yield (
            f"joined from {run.merged.get('shards')} shards, whose union is the plan; the "
            f"{run.merged.get('identity')} results that each of them repeated {said}"
            + but(run.merged, "taken although they differ in")
        )


def but(facts: Mapping[str, Any], lead: str) -> str:
    """The facts in which a run differed and was taken all the same, as a clause; "" where there are none."""
    differs = facts.get("differs") or {}
    return f"; {lead} " + ", ".join(f"{name} ({pair})" for name, pair in differs.items()) if differs else ""
