"""Which scale group every leaf of a graph belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from fastemb.amp._groups import ROOT

if TYPE_CHECKING:
    from fastemb.amp._grouped import GroupedScaler

# Reentrant checkpointing of torch, and of others who have taken over the name with the code.
_CHECKPOINT = "CheckpointFunctionBackward"


@dataclass(eq=False)
class Link:
    """What a boundary's node in the graph knows; its ``fastemb_link``.

    Attributes:
        group: that of what lies behind the boundary.
        name: in statistics and messages.
        inner: the edge of the node that leads behind the boundary; others stay outside.
        outer: the group in front of it, None until a loss went through `GradScaler.scale`.
        iteration: the one in which ``outer`` was set.
    """

    scaler: GroupedScaler
    group: int
    name: str
    inner: int
    outer: int | None = None
    iteration: int = -1

    def enter(self, outer: int, iteration: int) -> None:
        """Note the group in front of the boundary.

        Raises:
            RuntimeError: another one, in the same iteration.
        """
        if self.iteration == iteration and self.outer != outer:
            assert self.outer is not None
            names = self.scaler.group_names
            raise RuntimeError(
                f"GradScaler: the boundary of group {names[self.group]!r} ({self.name}) is reached "
                f"through the groups {names[self.outer]!r} and {names[outer]!r}, whose gradients "
                "have different scales; give each path a boundary of its own"
            )
        self.outer, self.iteration = outer, iteration


def walk(
    outputs: Iterable[Tensor],
    enter: Callable[[Link, int], None] | None,
    leaf: Callable[[Tensor, int], None],
) -> bool:
    """Go down from ``outputs``, tensors of the root group, to all leaves.

    Args:
        enter: called for every boundary and the group in front of it.
        leaf: called for every leaf and the group it is in, once for each group it is reached in.

    Returns:
        Whether there is reentrant checkpointing, which hides leaves, outside of boundaries.

    Raises:
        RuntimeError: it is behind a boundary.
    """
    hides = False
    stack: list[tuple[Any, int]] = []
    for output in outputs:
        if output.grad_fn is not None:
            stack.append((output.grad_fn, ROOT))
        elif output.requires_grad:
            leaf(output, ROOT)
    # Nodes are kept alive by this set, so none takes the place of another.
    seen = set(stack)
    while stack:
        node, group = stack.pop()
        link: Link | None = None
        if isinstance(node, BackwardCFunction):
            link = getattr(node, "fastemb_link", None)
            if link is not None and enter is not None:
                enter(link, group)
            elif type(node).__name__ == _CHECKPOINT:
                if group != ROOT:
                    raise RuntimeError(
                        "GradScaler: torch.utils.checkpoint with use_reentrant=True behind a "
                        "boundary hides which parameters have the scale of its group; use "
                        "use_reentrant=False"
                    )
                hides = True
        elif hasattr(node, "variable"):  # AccumulateGrad
            leaf(node.variable, group)
            continue
        for edge, (below, _) in enumerate(node.next_functions):
            if below is None:
                continue
            inside = link is not None and edge == link.inner
            step = (below, link.group if link is not None and inside else group)
            if step not in seen:
                seen.add(step)
                stack.append(step)
    return hides


def lists(outputs: Any) -> Any:
    """Losses in any nesting: iterables that can be gone through once, as lists.

    Raises:
        ValueError: names in place of losses, as a dict has them.
    """
    if isinstance(outputs, str):  # is an iterable of itself
        raise ValueError(
            f"GradScaler.scale: outputs must be a tensor or an iterable of tensors, got {outputs!r}"
            "; of a dict pass the values()"
        )
    if isinstance(outputs, Tensor) or not isinstance(outputs, Iterable):
        return outputs
    items = [lists(item) for item in outputs]
    return tuple(items) if isinstance(outputs, tuple) else items


def tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    else:
        for item in outputs:
            yield from tensors(item)
