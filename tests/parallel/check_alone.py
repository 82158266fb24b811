"""With one process, Horovod calls no compressor: training with one must be plain training."""

import horovod.torch as hvd
import torch

from hvd_compress import DGC, IWP


def trained(method):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    if method is not None:
        compression = method(model.named_parameters())
        assert compression.take_momentum(optimizer) == 0.9
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


torch.set_num_threads(1)
hvd.init()
assert hvd.size() == 1
for method in (IWP, DGC):
    assert torch.equal(trained(method), trained(None))
print("ok alone")
