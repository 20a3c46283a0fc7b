"""Mistakes in networks that go along time."""

from __future__ import annotations

import torch
from bench.promised.bodies_steps import (
    GatedCell,
    GatedStack,
    Memory,
    StateBlock,
    StateNet,
    StateSpace,
    WaveBlock,
    WaveNet,
)
from bench.promised.registry import become, fault, recycled, through_meta, within
from torch import Tensor, nn
from torch.nn import functional as F


@fault("lstm_forget_shut", "lstm", "shut_gates large_bias", "lstm")
def _(model: Memory) -> None:
    """The bias of the forget gate starts at -10: the sign was wrong."""
    for name, parameter in model.lstm.named_parameters():
        if "bias_ih" in name:
            parameter.data[40:80] = -10.0


@fault("lstm_wrong_quarter", "lstm", "shut_gates large_bias", "lstm")
def _(model: Memory) -> None:
    """Gates lie in another order than was thought: the large negative bias shuts input and output."""
    for name, parameter in model.lstm.named_parameters():
        if "bias_ih" in name:
            parameter.data[:40] = -12.0
            parameter.data[120:] = -12.0


@fault("lstm_no_batch_first", "lstm", "mixed_samples", "lstm")
def _(model: Memory) -> None:
    """`batch_first` was forgotten: the samples of the batch are read as the steps of time."""
    model.lstm.batch_first = False


@fault("lstm_weights_of_randn", "lstm", "saturation odd_scale", "lstm")
def _(model: Memory) -> None:
    """All weights of the LSTM are drawn with deviation 5."""
    for name, parameter in model.lstm.named_parameters():
        if "weight" in name:
            nn.init.normal_(parameter, std=5.0)


class SoftmaxMemory(Memory):
    def forward(self, steps: Tensor) -> Tensor:
        return F.softmax(super().forward(steps), dim=1)


@fault("lstm_softmax_output", "lstm", "softmax_twice", "")
def _(model: Memory) -> None:
    """The last line is a softmax, in front of cross-entropy."""
    become(model, SoftmaxMemory)


class ReluMemory(Memory):
    def forward(self, steps: Tensor) -> Tensor:
        return F.relu(super().forward(steps))


@fault("lstm_relu_on_logits", "lstm", "activation", "")
def _(model: Memory) -> None:
    """The logits pass a ReLU in front of the loss."""
    become(model, ReluMemory)


@fault("lstm_core_frozen", "lstm", "frozen", "lstm")
def _(model: Memory) -> None:
    """The recurrent part is frozen as if it had been trained before."""
    model.lstm.requires_grad_(False)
    model.first.requires_grad_(False)


class LastSteps(Memory):
    def forward(self, steps: Tensor) -> Tensor:
        return super().forward(steps[:, -8:])


@fault("lstm_last_steps", "lstm", "unused_input", "")
def _(model: Memory) -> None:
    """The window keeps the last eight steps of twenty; what must be recalled stands in front of it."""
    become(model, LastSteps)


@fault("gated_always_keeps", "gated", "shut_gates large_bias saturation", "cells")
def _(model: GatedStack) -> None:
    """The bias of the update gate is 15: the state is kept for ever, and nothing is written."""
    for cell in model.cells:
        nn.init.constant_(cell.update.bias, 15.0)


@fault("gated_never_keeps", "gated", "shut_gates large_bias saturation", "cells")
def _(model: GatedStack) -> None:
    """Update and reset gates start at -15: each step forgets all that was before it."""
    for cell in model.cells:
        nn.init.constant_(cell.update.bias, -15.0)
        nn.init.constant_(cell.reset.bias, -15.0)


class CutCell(GatedCell):
    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return super().forward(x, state.detach())


@fault("gated_state_detached", "gated", "detached", "cells")
def _(model: GatedStack) -> None:
    """The state is detached at each step, where it was to be detached between batches."""
    become(model.cells, CutCell)


class ReluCell(GatedCell):
    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return F.relu(self.new(torch.cat([x, state], -1)))


@fault("gated_plain_relu", "gated", "gradient_explosion huge_signal", "cells")
def _(model: GatedStack) -> None:
    """The gates were dropped and tanh exchanged for ReLU, with weights of gain 3."""
    become(model.cells, ReluCell)
    for cell in model.cells:
        nn.init.orthogonal_(cell.new.weight, gain=3.0)


@fault("gated_loud_candidates", "gated", "saturation odd_scale", "cells")
def _(model: GatedStack) -> None:
    """All weights of the cells are drawn with deviation 10."""
    for layer in within(model.cells, nn.Linear):
        nn.init.normal_(layer.weight, std=10.0)


class Reshaped(GatedStack):
    def forward(self, steps: Tensor) -> Tensor:
        return super().forward(steps.reshape(steps.shape[1], steps.shape[0], -1).transpose(0, 1))


@fault("gated_reshape_for_transpose", "gated", "mixed_samples", "")
def _(model: GatedStack) -> None:
    """`reshape(time, batch)` where `transpose` was meant: a sequence is put together from several samples."""
    become(model, Reshaped)


class Symmetric(WaveBlock):
    def pad(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, self.dilation))


@fault("wavenet_padding_ahead", "wavenet", "target_leak", "blocks", judge="prefix")  # fmt: skip
def _(model: WaveNet) -> None:
    """The convolutions are padded behind instead of in front: they look ahead."""
    become(model.blocks, Symmetric)


@fault("wavenet_flat_gates", "wavenet", "saturation odd_scale", "blocks")
def _(model: WaveNet) -> None:
    """The dilated convolutions are drawn with gain 100: every tanh and every gate is flat."""
    for block in model.blocks:
        nn.init.xavier_normal_(block.conv.weight, gain=100.0)


class NoWay(WaveBlock):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.gate(self.conv(self.pad(x)))
        return self.on(h), self.out(h)


class LastOnly(WaveNet):
    def forward(self, levels: Tensor) -> Tensor:
        x = self.embed(levels).transpose(1, 2)
        for block in self.blocks:
            x, out = block(x)
        return self.end2(F.relu(self.end1(F.relu(out)))).transpose(1, 2)


@fault("wavenet_no_shortcuts", "wavenet", "gradient_vanishing rank_collapse token_collapse", "blocks")
def _(model: WaveNet) -> None:
    """Neither shortcuts nor skips: gate after gate shrinks the signal, and only the last block is heard."""
    become(model.blocks, NoWay)
    become(model, LastOnly)


class Counted(WaveNet):
    def forward(self, levels: Tensor) -> Tensor:
        x = self.embed(levels).detach().transpose(1, 2)
        for block in self.blocks:
            x, out = block(x.detach())
        total = out.detach()
        return self.end2(F.relu(self.end1(F.relu(total)))).transpose(1, 2)


@fault("wavenet_detached", "wavenet", "detached", "blocks")
def _(model: WaveNet) -> None:
    """Block outputs are detached to save memory; only the two last layers learn."""
    become(model, Counted)


@fault("wavenet_never_written", "wavenet", "never_written parameter_not_finite non_finite",
       "end1")  # fmt: skip
def _(model: WaveNet) -> None:
    """The weight of one convolution was reserved and never drawn."""
    recycled(model.end1.weight)


@fault("wavenet_blocks_not_called", "wavenet", "unused", "blocks")
def _(model: WaveNet) -> None:
    """A loop variable is overwritten, and the first block is called eight times."""
    become(model, OneBlock)


class OneBlock(WaveNet):
    def forward(self, levels: Tensor) -> Tensor:
        x = self.embed(levels).transpose(1, 2)
        total = torch.zeros_like(x)
        for _number in range(len(self.blocks)):
            x, out = self.blocks[0](x)
        total = total + out
        return self.end2(F.relu(self.end1(F.relu(total)))).transpose(1, 2)


@fault("statespace_decay_of_negatives", "statespace", "parameter_not_finite non_finite", "blocks")
def _(model: StateNet) -> None:
    """The decay is stored as the logarithm of numbers that are negative."""
    for system in within(model, StateSpace):
        system.log_decay.data = torch.log(-torch.linspace(0.5, 4.0, 8)).repeat(32, 1)


class Growing(StateSpace):
    def kernel(self, length: int) -> Tensor:
        step = self.log_step.exp()
        rate = self.log_decay.exp() * step * 40
        return torch.einsum("ds,dsl->dl", self.read * step**0.5, torch.exp(rate[..., None] * torch.arange(length)))


@fault("statespace_growing", "statespace", "non_finite huge_signal", "blocks")
def _(model: StateNet) -> None:
    """The sign of the decay was lost and steps are too long: the kernel grows beyond float32."""
    become(within(model, StateSpace), Growing)


class LateQuarter(StateNet):
    def forward(self, steps: Tensor) -> Tensor:
        late = torch.arange(steps.shape[1])[:, None] >= 15
        return super().forward(steps * late)


@fault("statespace_mask_inverted", "statespace", "unused_input", "")
def _(model: StateNet) -> None:
    """The mask of valid steps is inverted: the first fifteen of twenty are set to zero."""
    become(model, LateQuarter)


@fault("statespace_norms_drawn", "statespace", "norm_weight odd_scale gradient_vanishing", "blocks")
def _(model: StateNet) -> None:
    """Norm scales are drawn with 0.002 by an initialization that goes over all parameters but the systems'."""
    for name, parameter in model.named_parameters():
        if "system" not in name:
            nn.init.normal_(parameter, std=0.002)


class OverTime(StateBlock):
    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.system(F.layer_norm(x[..., None], (1,))[..., 0]))
        return x + F.glu(self.mix(h), -1)


class OverTimeNet(StateNet):
    def forward(self, steps: Tensor) -> Tensor:
        x = self.first(steps)
        for block in self.blocks:
            x = block(x)
        return self.head(F.layer_norm(x[..., None], (1,)).squeeze(-1).mean(1))


@fault("statespace_norm_of_single_values", "statespace", "wrong_axis", "blocks")
def _(model: StateNet) -> None:
    """An axis was added for broadcasting, and the norms run over it: one value each, always zero."""
    become(model.blocks, OverTime)
    become(model, OverTimeNet)


class Doubled(StateBlock):
    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.system(self.norm(x)))
        return 4 * x + F.glu(self.mix(h), -1)


@fault("statespace_stream_times_four", "statespace", "odd_branch huge_signal", "blocks")
def _(model: StateNet) -> None:
    """A gain of four on the shortcut of every block was meant for the branch."""
    become(model.blocks, Doubled)


def statespace_through_meta() -> nn.Module:
    return through_meta(StateNet)


@fault("statespace_through_meta", "statespace", "meta_law never_written parameter_not_finite non_finite", "blocks")
def _(model: StateNet) -> nn.Module:
    """Built on the meta device and filled by reset_parameters, which the state-space layers do not have."""
    return statespace_through_meta()


@fault("wavenet_loud_skip", "wavenet", "odd_scale start_loss odd_branch", "blocks.2.out")
def _(model: WaveNet) -> None:
    """What one block sends to the end was drawn with gain 300."""
    nn.init.xavier_normal_(model.blocks[2].out.weight, gain=300.0)


class TenTimes(GatedStack):
    def forward(self, steps: Tensor) -> Tensor:
        x = self.first(steps)
        for cell, norm in zip(self.cells, self.norms, strict=True):
            state = torch.zeros_like(x[:, 0])
            states = []
            for step in norm(x).unbind(1):
                state = cell(step, state)
                states.append(state)
            x = 10 * x + torch.stack(states, 1)
        return self.head(x[:, -1])


@fault("gated_shortcut_times_ten", "gated", "odd_branch huge_signal", "cells")
def _(model: GatedStack) -> None:
    """Each shortcut is multiplied by ten, which was meant for the learning rate of the branch."""
    become(model, TenTimes)
