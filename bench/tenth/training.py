"""A short training and the loss on one held-out data."""

import torch

from .bodies import run


def held_out(model, draw, score, seed):
    """The mean loss on four small batches that training never sees, in eval mode."""
    was = [(m, m.training) for m in model.modules()]
    model.eval()
    held = torch.Generator().manual_seed(900_000 + seed)
    with torch.no_grad():
        values = [float(score(model, *draw(held))) for _ in range(4)]
    for module, training in was:
        module.training = training
    return sum(values) / len(values)


def train(model, draw, loss, *, seed, steps, lr, sgd=False, score=None, held_draw=None, shift=0):
    """Give (held-out loss before, held-out loss after).  No clipping, no warmup: a bad start must show.

    ``shift`` picks another stream of batches for the same start.
    """
    if score is None:

        def score(net, inputs, targets):
            return loss(run(net, inputs), targets)

    held_draw = held_draw or draw
    before = held_out(model, held_draw, score, seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9) if sgd else torch.optim.Adam(parameters, lr=lr)
    torch.manual_seed(seed)
    stream = torch.Generator().manual_seed(5000 + seed + 100 * shift)
    for _ in range(steps):
        inputs, targets = draw(stream)
        optimizer.zero_grad()
        value = loss(run(model, inputs), targets)
        if not torch.isfinite(value):
            return before, float("nan")
        value.backward()
        optimizer.step()
    return before, held_out(model, held_draw, score, seed)
