"""QuantTensors in files and modules: every way back gives the same bytes."""

import copy
import io

import pytest
import torch
from tensor_cases import ROW, SPECS, TILE, assert_same, every_layout, every_spec, inner, make, pickled, shares, values

import halfbyte as hb
from halfbyte.layout import SWIZZLED_32_4_4


class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(make(ROW), requires_grad=False)
        self.register_buffer("other", make(TILE, scale_layout=SWIZZLED_32_4_4))


class TestStorage:
    @every_spec
    @every_layout
    def test_save_and_load_weights_only(self, spec, scale_layout):
        q = make(spec, 4, 10, 72, scale_layout=scale_layout)
        file = io.BytesIO()
        torch.save({"q": q, "alias": q.view(40, 72)}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert_same(loaded["q"], q)
        assert len(shares(loaded["q"], loaded["alias"])) == len(inner(q))
        file.seek(0)
        assert torch.load(file, weights_only=True, map_location="meta")["q"].device.type == "meta"

    @every_spec
    def test_pickle(self, spec):
        q = make(spec)
        assert_same(pickled(q), q)
        assert not shares(pickled(q), q)

    def test_damaged_pickle_is_refused(self):
        rebuild, state = make(ROW).__reduce_ex__(2)
        with pytest.raises(ValueError, match=r"qdata.shape"):
            rebuild(state[0][:3], *state[1:])
        with pytest.raises(ValueError, match="key='nvfp5'"):
            rebuild(*state[:4], "nvfp5", *state[5:])

    def test_module(self):
        module = Holder()
        other = Holder()
        other.weight.zero_()
        other.other.zero_()
        other.load_state_dict(module.state_dict())
        for name in ("weight", "other"):
            assert_same(getattr(other, name), getattr(module, name))
        other.load_state_dict({"weight": values(40, 72, seed=4), "other": values(40, 72, seed=4)})
        assert_same(other.weight, make(ROW, seed=4))
        identity = id(other.weight)
        other.to(torch.float32)
        assert id(other.weight) == identity and isinstance(other.weight, torch.nn.Parameter)
        assert other.weight.dtype == other.other.dtype == torch.float32
        assert torch.equal(other.weight.qdata, make(ROW, seed=4).qdata)
        for again in (copy.deepcopy(module), pickled(module)):
            assert_same(again.weight, module.weight)
            assert_same(again.other, module.other)
            assert isinstance(again.weight, torch.nn.Parameter) and not isinstance(again.other, torch.nn.Parameter)

    def test_safetensors(self, tmp_path):
        torch_file = pytest.importorskip("safetensors.torch")
        safetensors = pytest.importorskip("safetensors")
        tensors = {f"layer.{name}": make(spec, 4, 10, 72) for name, spec in SPECS.items()}
        tensors["swizzled"] = make(TILE, scale_layout=SWIZZLED_32_4_4)
        tensors["bias"] = values(7)
        tensors["whole"] = tensors["again"] = make(ROW)
        tensors["head"], tensors["tail"] = tensors["whole"].split(24)
        plain, metadata = hb.tensor.to_safetensors(tensors)
        torch_file.save_file(plain, tmp_path / "model.safetensors", {"note": "kept", **metadata})
        with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
            metadata = file.metadata()
        loaded = hb.tensor.from_safetensors(torch_file.load_file(tmp_path / "model.safetensors"), metadata)
        assert loaded.keys() == tensors.keys() and torch.equal(loaded["bias"], tensors["bias"])
        for name, tensor in tensors.items():
            if name != "bias":
                assert_same(loaded[name], tensor)
        loaded["tail"].zero_()  # what was a slice owns its amax now

    @every_spec
    def test_what_safetensors_cannot_write_names_what_can(self, spec, tmp_path):
        torch_file = pytest.importorskip("safetensors.torch")
        q, path = make(spec, 4, 10, 72), tmp_path / "model.safetensors"
        holder = Holder()
        writers = {
            "file": lambda: torch_file.save_file({"bias": values(7), "q": q}, path),
            "bytes": lambda: torch_file.save({"q": torch.nn.Parameter(q, requires_grad=False)}),
            "model": lambda: torch_file.save_model(holder, path),
        }
        for write in writers.values():
            with pytest.raises(TypeError, match=r"plain, metadata = hb\.tensor\.to_safetensors\(tensors\)") as error:
                write()
            assert error.value.__suppress_context__, "torch's own words about the storage would stand above ours"
        assert not path.exists()
        plain, metadata = hb.tensor.to_safetensors(holder.state_dict())  # the remedy
        torch_file.save_file(plain, path, metadata)
        assert path.stat().st_size > 0

    @every_layout
    def test_grouped_operands_come_back_from_safetensors(self, scale_layout):
        """Groups along the rows and along the columns; the codes of each group decide."""
        offsets = torch.tensor([5, 5, 24], dtype=torch.int32)
        specs = hb.NVFP4(), hb.NVFP4()
        row, col = hb.grouped_quantize_row_col(values(24, 40), offsets, *specs, scale_layout=scale_layout)
        plain, metadata = hb.tensor.to_safetensors({"row": row, "col": col})
        loaded = hb.tensor.from_safetensors(plain, metadata)
        for name, q in (("row", row), ("col", col)):
            assert_same(loaded[name], q)
            assert loaded[name].splits_columns == (name == "col")
            assert torch.equal(loaded[name].group_offsets, offsets)

    def test_safetensors_refusals(self):
        plain, metadata = hb.tensor.to_safetensors({"w": make(ROW)})
        assert hb.tensor.from_safetensors(plain, None).keys() == plain.keys()
        with pytest.raises(ValueError, match=r"'w\.qdata'"):
            hb.tensor.to_safetensors({"w": make(ROW), "w.qdata": values(3)})
        older = metadata["halfbyte.w"].replace('"version": 1', '"version": 0')
        for damage in ("{", '{"version": 2}', older, metadata["halfbyte.w"].replace("nvfp4", "nvfp5"), "[]"):
            with pytest.raises(ValueError, match="tensor 'w'"):
                hb.tensor.from_safetensors(plain, {"halfbyte.w": damage})
        with pytest.raises(ValueError, match=r"'w'.*w\.amax"):
            hb.tensor.from_safetensors({k: v for k, v in plain.items() if k != "w.amax"}, metadata)
        with pytest.raises(ValueError, match=r"'w'.*qdata.shape"):
            hb.tensor.from_safetensors({**plain, "w.qdata": plain["w.qdata"][1:]}, metadata)
        with pytest.raises(ValueError, match="both"):
            hb.tensor.from_safetensors({**plain, "w": values(3)}, metadata)

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_distributed_checkpoint(self, tmp_path):
        dcp = pytest.importorskip("torch.distributed.checkpoint")
        tensors = {name: make(spec) for name, spec in SPECS.items()}
        dcp.save(tensors, checkpoint_id=tmp_path, no_dist=True)
        loaded = {name: torch.zeros_like(q) for name, q in tensors.items()}
        dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
        for name, q in tensors.items():
            assert_same(loaded[name], q)
