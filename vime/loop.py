"""The RL loop. Synchronous training is the same loop with `max_staleness: 0`."""

from __future__ import annotations

import asyncio

from vime.roles import Run


async def train(run: Run) -> None:
    """Publish, then sample and learn side by side until the schedule ends. The first failure stops both and surfaces."""
    await run.evaluation.run_if_due(await run.sync.publish())
    collector, learner = asyncio.create_task(collect(run)), asyncio.create_task(learn(run))
    try:
        await asyncio.wait({collector, learner}, return_when=asyncio.FIRST_COMPLETED)
        if collector.done():  # its failure starves the learner, whose error then hides the cause
            collector.result()
        await learner
    finally:
        collector.cancel()
        learner.cancel()
        await asyncio.gather(collector, learner, return_exceptions=True)


async def collect(run: Run) -> None:
    """Sample as long as the buffer has room. Room is per group; what is not filled is given back by the rollout."""
    try:
        async for group in run.rollout.groups(run.buffer.room()):
            await run.buffer.put(group)
    finally:
        run.buffer.close()


async def learn(run: Run) -> None:
    """Train batch after batch. A step's row is written before its checkpoint, its checkpoint before its weights go out."""
    for step in run.schedule:
        batch = await run.buffer.take(step)
        async with run.turns.train():
            report = await run.trainer.step(batch)
            run.observer.step(report)
            await run.checkpoints.save_if_due(report)
            version = await run.sync.publish()
        await run.evaluation.run_if_due(version)
        run.buffer.advance(version)
