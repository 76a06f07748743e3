"""What stays in high precision unless somebody says otherwise: heads, routers, adapters and the ends of stacks.

**Stacks.** A stack of blocks is the outermost of the following that holds linear layers; what it holds are its blocks,
and no container inside a block is another stack.

- An nn.ModuleList.
- An nn.ModuleDict whose keys are numbered, "0", "1", … or "layer_0", "layer_1", …, as torchtitan keeps its layers.
- An nn.Sequential in which a class of blocks recurs. Its blocks are its children from the first to the last of such a
  class, so embeddings before them and heads behind them do not count.

In the latter two a block is a module with a forward of its own and linear layers inside: neither a linear layer nor an
nn.Sequential is one, so `Sequential(Linear, SiLU, Linear)` is an MLP. Containers called *expert* hold alternatives, not
a sequence, and are no stacks.

**Heads.** What `get_output_embeddings()` returns, a layer whose weight is an embedding's, and layers outside of every
stack that have one of the names `HEAD_NAMES` or lie in one of `HEAD_MODULES`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

HEADS = "@heads"
"""Stands for heads, found by structure, among the names of Keep."""

HEAD_NAMES = frozenset(
    {"lm_head", "head", "output", "output_layer", "proj_out", "embed_out", "vocab_projector"}
    | {"classifier", "score", "qa_outputs", "seq_relationship"}
)
"""Of Llama's own code and torchtitan, Megatron, Whisper, GPT-NeoX, DistilBERT, and of classifiers."""

HEAD_MODULES = frozenset({"classifier", "classification_head"})
"""Modules that are heads with all that they hold."""

ROUTERS = ("*router", "*router.*", "*.gate", "*.gate.*", "*shared_expert_gate")
ADAPTERS = ("lora_*", "*.lora_*", "*modules_to_save.*", "*original_module", "*original_module.*")
"""What PEFT puts beside a layer: adapters are small, and trained from zero."""

WRAPPERS = frozenset({"base_layer", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""What PEFT, torch.compile, checkpoints and FSDP call the module that they wrap."""


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which linear layers stay in high precision: by default as in NVIDIA's NVFP4 pretraining (arXiv 2509.25149).

    Stacks of blocks are the outermost nn.ModuleList, numbered nn.ModuleDict or nn.Sequential of recurring blocks that
    holds linear layers; docs/recipes.md has the rule.

    Args:
        names: globs of fully qualified names, with and without the parts that wrappers add; by default those of heads,
            embeddings, routers and adapters of PEFT. "@heads" among them stands for heads found by structure: the
            model's output embeddings, layers tied to an embedding, and layers outside of all stacks that are called
            output, proj_out, classifier, score, …
        first_blocks: this many blocks at the start of every stack of blocks.
        last_fraction: this share of the blocks at the end of the stack, rounded up, but never all of them.
    """

    names: tuple[str, ...] = ("*lm_head", "*embed*", "*output_layer", HEADS, *ROUTERS, *ADAPTERS)
    first_blocks: int = 0
    last_fraction: float = 0.15

    def __post_init__(self) -> None:
        if isinstance(self.names, str) or not all(isinstance(name, str) for name in self.names):
            raise TypeError(f"names={self.names!r}: give a tuple of globs")
        object.__setattr__(self, "names", tuple(self.names))
        if isinstance(self.first_blocks, bool) or not isinstance(self.first_blocks, int) or self.first_blocks < 0:
            raise ValueError(f"first_blocks={self.first_blocks!r}: give a number of blocks >= 0")
        share = self.last_fraction
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"last_fraction={share!r}: give a share between 0 and 1")

    def last_blocks(self, count: int) -> int:
        """Return how many of `count` blocks stay in high precision at the end."""
        return min(math.ceil(self.last_fraction * count - 1e-9), max(count - 1, 0))


def plain_name(name: str) -> str:
    """Return a fully qualified name without what wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def matches(name: str, glob: str) -> bool:
    """Whether a glob matches a fully qualified name, as it is or as it was before anything was wrapped."""
    plain = plain_name(name)
    return fnmatchcase(name, glob) or (plain != name and fnmatchcase(plain, glob))


def kept_layers(model: nn.Module, layers: Mapping[str, nn.Module], keep: Keep) -> dict[str, str]:
    """Return {name: reason} of the layers that `keep` leaves in high precision; those of "@heads" under "@heads" too.

    Args:
        model: the whole model.
        layers: its linear layers by name.
        keep: the policy.
    """
    stacks = _stacks(model, layers)
    reasons = _edges(layers, stacks, keep)
    heads = _heads(model, layers, stacks) if HEADS in keep.names else {}
    for name in layers:
        for glob in keep.names:
            if matches(name, glob):
                reasons[name] = f"name matches {glob!r}"
                break
            if glob == HEADS and name in heads:
                reasons[name] = heads[name]
                break
    return reasons


def unmatched_names(model: nn.Module, layers: Mapping[str, nn.Module], keep: Keep) -> tuple[str, ...]:
    """Return the names of an explicit `keep` that match no layer; those of the default may, where all are there."""
    default = Keep().names
    ours = set(default) if set(default) <= set(keep.names) else set()
    heads = _heads(model, layers, _stacks(model, layers)) if HEADS in keep.names else {}
    return tuple(
        glob
        for glob in keep.names
        if glob not in ours and not (glob == HEADS and heads) and not any(matches(name, glob) for name in layers)
    )


def has_stack(model: nn.Module, layers: Mapping[str, nn.Module]) -> bool:
    """Whether the model has blocks of which the first and the last may be kept."""
    return bool(_stacks(model, layers))


def _heads(model: nn.Module, layers: Mapping[str, nn.Module], stacks: Mapping[str, list[str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    blocks = tuple(f"{block}." for names in stacks.values() for block in names)
    for name in layers:
        if f"{name}.".startswith(blocks):
            continue
        parts = plain_name(name).split(".")
        called = [
            *(part for part in parts if part in HEAD_MODULES),
            *(part for part in parts[-1:] if part in HEAD_NAMES),
        ]
        if called:
            found[name] = f"head, called {called[0]!r} outside of the blocks"
    tables = {id(m.weight): n for n, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    for name, layer in layers.items():
        table = tables.get(id(getattr(layer, "weight", None)))
        if table is not None:
            found[name] = f"head, tied to the embedding {table}"
    for owner, head in _output_embeddings(model):
        inside = {id(module) for module in head.modules()}
        found |= {name: f"head, the output embeddings of {owner}" for name, m in layers.items() if id(m) in inside}
    return found


def _output_embeddings(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield what models of transformers, and others with their interface, say is their head."""
    for module in model.modules():
        ask = getattr(module, "get_output_embeddings", None)
        if callable(ask):
            try:
                head = ask()
            except (AttributeError, NotImplementedError):  # models without one
                continue
            if isinstance(head, nn.Module) and head is not module:
                yield type(module).__name__, head


def _edges(layers: Mapping[str, nn.Module], stacks: Mapping[str, list[str]], keep: Keep) -> dict[str, str]:
    """Return {layer name: reason} of the layers in the first and last blocks of every stack."""
    kept: dict[str, str] = {}
    for path, blocks in stacks.items():
        count, last = len(blocks), keep.last_blocks(len(blocks))
        for index, block in enumerate(blocks):
            edge = "first" if index < keep.first_blocks else "last" if index >= count - last else None
            if edge is not None:
                amount = keep.first_blocks if edge == "first" else last
                reason = f"{edge} {amount} of {count} blocks of {path or 'the model'}"
                kept |= {name: reason for name in layers if f"{name}.".startswith(f"{block}.")}
    return kept


def _stacks(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """Return {path of a stack: names of its blocks}."""
    stacks: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        if any(path.startswith(f"{outer}.") or not outer for outer in stacks) or "expert" in path.rpartition(".")[2]:
            continue
        prefix = f"{path}." if path else ""
        blocks = [prefix + child for child in _blocks(module, prefix, layers)]
        if any(f"{name}.".startswith(f"{block}.") for block in blocks for name in layers):
            stacks[path] = blocks
    return stacks


def _blocks(module: nn.Module, prefix: str, layers: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the children that are blocks if the module is a stack, else none."""
    children = list(module._modules)
    if isinstance(module, nn.ModuleList):
        return children
    if not isinstance(module, nn.ModuleDict | nn.Sequential):
        return []
    kinds = {
        name: type(child)
        for name, child in module.named_children()
        if type(child).forward is not nn.Sequential.forward
        and any(layer.startswith(f"{prefix}{name}.") for layer in layers)
    }
    if isinstance(module, nn.ModuleDict):
        return children if kinds and _numbered(children) else []
    often = Counter(kinds.values())
    recurring = [i for i, child in enumerate(children) if child in kinds and often[kinds[child]] > 1]
    return [c for c in children[recurring[0] : recurring[-1] + 1] if c in kinds] if recurring else []


def _numbered(keys: list[str]) -> bool:
    """Whether keys count upwards: all of one word, or none, and a number; parts of a model may begin anywhere."""
    found = [re.fullmatch(r"(.*?)(\d+)", key) for key in keys]
    words = {match[1] for match in found if match}
    numbers = [int(match[2]) for match in found if match]
    return len(numbers) == len(keys) and len(words) == 1 and numbers == sorted(set(numbers))
