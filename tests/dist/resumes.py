"""A training script that dies once: `torchrun --max-restarts 1 -m tests.dist.resumes FOLDER DEATH`.

Six steps, a checkpoint after each. Rank 1 ends itself before step 3 of the first try (DEATH "none": never). Rank 0 writes each
step's loss to FOLDER/losses.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import autoplan
from autoplan.models import MLP


def main(folder: Path, death: str) -> list[float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MLP((8, 16, 16, 4))
    pm = autoplan.parallelize(model, batch_of(0), constraints=autoplan.Constraints(dp=2, zero=2))
    opt = pm.optimizer(torch.optim.AdamW, lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    if (folder / "state").exists():
        pm.load(folder / "state", optimizer=opt)
        schedule.last_epoch = pm.num_steps
    losses = []
    while pm.num_steps < 6:
        step = pm.num_steps
        if step == 3 and death == "kill" and dist.get_rank() == 1 and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        loss = pm.forward_backward(batch_of(step)).item()
        opt.step()
        opt.zero_grad()
        schedule.step()
        losses.append(loss)
        if dist.get_rank() == 0:
            with (folder / "losses").open("a") as file:
                file.write(f"{step} {loss!r}\n")
        pm.save(folder / "state", optimizer=opt, wait=step % 2 == 0)
    pm.finish_saving()
    return losses


def batch_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, 8, generator=generator), "labels": torch.randint(0, 4, (8,), generator=generator)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
