"""What a training run takes of every GPU, before it runs: memory, traffic, multiplications, time.

from halfbyte.plan import PlanRequest, plan
found = plan(PlanRequest(model="llama3-70b", gpus=1024, recipe="nvfp4", hardware="h200"))
found.peak.total, found.step.total, found.job.mesh, found.refused
"""

from halfbyte.plan.mesh import Mesh
from halfbyte.plan.planning import Plan, PlanRequest, plan

__all__ = ["Mesh", "Plan", "PlanRequest", "plan"]
