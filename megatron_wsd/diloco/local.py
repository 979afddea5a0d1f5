"""The island's side of the fragments: what it trained since when, and how it takes over a new anchor.

Everything here belongs to the training thread, but `publish`, which the outer half calls for a contribution
that it has settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_wsd.config import Config
from megatron_wsd.diloco.capture import Contribution, encode, feed_back
from megatron_wsd.diloco.faults import Faults
from megatron_wsd.diloco.fragments import Fragment
from megatron_wsd.diloco.state import FragmentState, OuterState
from megatron_wsd.diloco.wire import cut
from megatron_wsd.optim import native, wire
from megatron_wsd.shards.zero3 import Shards


@dataclass
class LocalFragment:
    """One fragment as this rank trains it.

    Attributes:
        members: indices of its shards.
        base: what the island trains from, of the anchor's dtype, [layout.total]: in synchronous mode the
            anchor itself, else a copy of the version that was adopted last; never the live anchor, from which
            the others' progress would be subtracted.
        version: of ``base``.
        steps: inner steps since the newest capture, or adoption in synchronous mode.
        tokens: tokens of the island since then.
        error: fp32 [layout.total], what encoded contributions have left out so far; None in fp32.
        missed: turns that passed while a contribution was in flight, since the newest adoption.
        capture_s: seconds for which the newest capture stopped training.
        flight: the contribution that no round has settled and no boundary adopted yet.
        captured_at: inner step of the island at which it was captured.
        published: version that waits in ``base`` to be adopted; None while there is none.
        reset: at adoption nothing local is kept: the contribution was not finite.
        buffer: fp32 [layout.total] for captures, in asynchronous mode, where several may be in flight.
    """

    members: Sequence[int]
    base: torch.Tensor
    version: int = 0
    steps: int = 0
    tokens: int = 0
    error: torch.Tensor | None = None
    flight: Contribution | None = None
    captured_at: int = 0
    missed: int = 0
    capture_s: float = 0.0
    published: int | None = None
    reset: bool = False
    buffer: torch.Tensor | None = None


class Local:
    """All fragments as this rank trains them.

    Args:
        shards: where the island holds its parameters.
        plan: of the fragments.
        state: anchors; its layouts say where a shard lies in a flat buffer, its residence where buffers are.
        config: of the run.
        faults: to be injected.
    """

    def __init__(
        self,
        shards: Shards,
        plan: Sequence[Fragment],
        state: OuterState,
        config: Config,
        faults: Faults,
    ) -> None:
        self._shards, self._state, self._config, self._faults = shards, state, config, faults
        self._residence = state.residence
        self._fmt = wire.WireFormat.of(config.sync.wire)
        self._lockstep = config.sync.mode == "sync"
        lossy = not self._fmt.exact
        self.fragments = [
            LocalFragment(
                members=plan[i].members,
                base=f.anchor if self._lockstep else self._residence.zeros(f.layout.total, f.anchor.dtype),
                error=torch.zeros(f.layout.total, device=self._residence.device) if lossy else None,
            )
            for i, f in enumerate(state.fragments)
        ]
        if not self._lockstep:
            for mine, f in zip(self.fragments, state.fragments, strict=True):
                mine.base.copy_(f.anchor)
        self._chunks = [cut(self._fmt, f.layout.total, config.sync.bucket_bytes) for f in state.fragments]
        largest = max(f.layout.total for f in state.fragments)
        self._scratch = self._residence.zeros(largest)
        self._gradient = self._residence.zeros(largest) if self._lockstep else None

    def count(self, tokens: int) -> None:
        """One more inner step."""
        for f in self.fragments:
            f.steps += 1
            f.tokens += tokens

    def uncommitted(self, island: int) -> tuple[int, int]:
        """Inner steps and tokens of this island that no round has committed, summed over the fragments."""
        steps = tokens = 0
        for f, state in zip(self.fragments, self._state.fragments, strict=True):
            steps, tokens = steps + f.steps, tokens + f.tokens
            if f.flight is not None and state.taken.get(island, -1) < f.flight.cursor:
                steps, tokens = steps + f.flight.steps, tokens + f.flight.tokens
        return steps, tokens

    def capture(self, i: int, cursor: int, *, keep: bool = False) -> Contribution:
        """Take the progress since the base as a pseudo-gradient: base - local.

        In asynchronous mode the counts start anew.

        Args:
            i: number of the fragment.
            cursor: inner steps of this island.
            keep: in a buffer of its own; else the next capture may overwrite it.
        """
        f, layout = self.fragments[i], self._state.fragments[i].layout
        if keep:
            gradient = self._residence.zeros(layout.total)
        elif self._gradient is not None:
            gradient = self._gradient[: layout.total]
            gradient.zero_()  # another fragment's numbers lie where this one has padding
        else:
            f.buffer = self._residence.zeros(layout.total) if f.buffer is None else f.buffer.zero_()
            gradient = f.buffer
        self._shards.read(layout.views(gradient), f.members)
        torch.sub(f.base, gradient, out=gradient)
        self._faults.here("capture", self._state.outer_step, gradient)
        finite = native.gradient_ok(gradient, layout.table)
        contribution = Contribution(i, gradient, finite, f.version, f.steps, f.tokens, cursor)
        f.captured_at = cursor
        if not self._lockstep:  # else `adopt` does: a run that is stopped in a round keeps its progress
            f.steps = f.tokens = 0
        return contribution

    def encode(self, contribution: Contribution) -> Contribution:
        """Make it ready to be offered, also to another thread; the same object."""
        i = contribution.fragment
        layout, error = self._state.fragments[i].layout, self.fragments[i].error
        encode(self._fmt, self._chunks[i], layout, contribution, error, self._scratch)
        self._residence.finish()  # the outer half's stream does not wait for that of this thread
        self._faults.here("offer", self._state.outer_step)
        return contribution

    def committed(self, contribution: Contribution) -> None:
        """What the encoding left out goes into the next one; once, however often it is called.

        The outer half calls it while it holds ``state.still``, so that a checkpoint never has the commit
        without the error or the error without the commit.
        """
        error = self.fragments[contribution.fragment].error
        if error is not None and not contribution.counted:
            feed_back(self._fmt, self._chunks[contribution.fragment], contribution, error)
        contribution.counted = True

    def adopt(self, i: int) -> None:
        """Hold the anchor of a fragment; nothing local is kept. All ranks must call it."""
        f, state = self.fragments[i], self._state.fragments[i]
        self._faults.here("adopt", self._state.outer_step)
        if f.base is not state.anchor:
            f.base.copy_(state.anchor)
        self._write(i, f.base, state)
        f.version = state.version
        f.steps = f.tokens = 0
        f.flight = f.published = None
        f.reset = False

    def publish(self, i: int, *, committed: bool, reset: bool) -> None:
        """Put the newest anchor where training will find it; on the outer half's thread.

        Args:
            i: number of the fragment, whose contribution has been settled.
            committed: it is part of the anchor.
            reset: it was not finite: the local values are worthless.
        """
        f, state = self.fragments[i], self._state.fragments[i]
        if f.flight is None:  # training has ended, and holds the anchor already
            return
        if committed:
            self.committed(f.flight)
        if self._config.sync.adopt == "rebase" and not reset:
            # From here on the buffer holds the local values at the time of the capture.
            torch.sub(f.base, f.flight.pseudo_gradient, out=f.flight.pseudo_gradient)
        f.base.copy_(state.anchor)
        f.reset = reset
        self._faults.here("publish", self._state.outer_step)
        self._residence.finish()  # training's stream does not wait for that of this thread
        f.published = state.version  # last: the training thread looks at this

    def merge_in(self, i: int) -> int:
        """Adopt what was published, by ``sync.adopt``; all ranks must call it.

            mix:     local = (1 - merge_alpha) anchor + merge_alpha local
            rebase:  local = anchor + (local - local at capture)

        Returns:
            The version that the island trains from now on.
        """
        f, state, sync = self.fragments[i], self._state.fragments[i], self._config.sync
        assert f.flight is not None and f.published is not None
        self._faults.here("adopt", self._state.outer_step)
        value = self._scratch[: state.layout.total]
        if f.reset:
            value.copy_(f.base)
            f.steps = f.tokens = 0
        else:
            value.zero_()
            self._shards.read(state.layout.views(value), f.members)
            if sync.adopt == "mix":
                torch.lerp(f.base.float(), value, sync.merge_alpha, out=value)
            else:
                value.sub_(f.flight.pseudo_gradient).add_(f.base)
        self._write(i, value, state)
        f.version = f.published
        f.flight = f.published = None
        f.reset = False
        return f.version

    def _write(self, i: int, value: torch.Tensor, state: FragmentState) -> None:
        self._shards.write(state.layout.views(value), self.fragments[i].members)

    def hold(self) -> list[torch.Tensor]:
        """A copy of what the island holds, for `restore`."""
        copies = []
        for f, state in zip(self.fragments, self._state.fragments, strict=True):
            copy = torch.zeros(state.layout.total)
            self._shards.read(state.layout.views(copy), f.members)
            copies.append(copy)
        return copies

    def restore(self, values: Sequence[torch.Tensor]) -> None:
        """Hold other values, [layout.total] for each fragment; all ranks must call it."""
        for i, value in enumerate(values):
            self._write(i, value, self._state.fragments[i])
