"""What is trained: a small model that notes what a trainer gives it, and the same training in a plain loop."""

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import hvd_compress

STEPS, SAVED, BATCH, ACCUMULATION, PERIOD = 9, 3, 8, 2, 4  # steps 3, 6 and 9 lie between two exchanges


class Net(nn.Module):
    """Notes its training batches, and its weights whenever it is evaluated."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
        )
        self.batches, self.evaluated = [], []

    def forward(self, x, labels=None):
        if self.training:
            self.batches.append((x.clone(), labels.clone()))
        else:
            self.evaluated.append(flat(self))
        outputs = self.layers(x)
        return {"loss": nn.functional.cross_entropy(outputs, labels), "logits": outputs}


def net():
    torch.manual_seed(0)
    return Net()


def optimizers(model):
    """Two optimizers as one: Muon of the hidden matrix, AdamW of the rest."""
    matrices, others = hvd_compress.hidden_matrices(model)
    assert matrices and others
    muon = torch.optim.Muon(matrices.values(), lr=3e-3, adjust_lr_fn="match_rms_adamw")
    return hvd_compress.trainers.CombinedOptimizer([muon, torch.optim.AdamW(others.values(), lr=3e-3)])


def schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def data(count=SAVED * ACCUMULATION * BATCH * 2):
    """By default the optimizer steps of two ranks between two checkpoints."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 16, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(1))


def flat(model):
    """All parameters and floating-point buffers."""
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    return torch.cat([t.detach().flatten().clone() for t in tensors])


def equal_on_all_ranks(tensor):
    others = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
    distributed.all_gather(others, tensor)
    return all(torch.equal(other, tensor) for other in others)


def plain(batches, build, options):
    """The weights after a plain loop over a rank's batches."""
    model = net()
    optimizer, ddp = optimizers(model), None
    scheduler = schedule(optimizer)
    if isinstance(build, type):
        compression, ddp = build(model, **options), DistributedDataParallel(model)
        ddp.register_comm_hook(compression, hvd_compress.ddp_hook)
    else:
        local = build(model, optimizer, **options)
    for first in range(0, len(batches), ACCUMULATION):
        chosen = batches[first : first + ACCUMULATION]
        for number, (x, labels) in enumerate(chosen, 1):
            if ddp is not None:
                ddp.require_backward_grad_sync = number == ACCUMULATION
            ((ddp or model)(x, labels)["loss"] / ACCUMULATION).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if ddp is None:
            local.step()
    if ddp is None:
        local.finish(model)
    return flat(model)
