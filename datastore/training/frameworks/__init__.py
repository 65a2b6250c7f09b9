"""The frameworks: what the processes of each need to know about each other. To add a framework, write a module like
`jax.py` and name it here and in `framework` of datastore/api/trainingjob.py.

A framework is pure: it makes variables and files from a topology. The values of its variables may refer, by $(NAME) as
in Kubernetes, to two variables that every task has: DATASTORE_INDEX, the index in the role, and DATASTORE_RANK (0 for
ps and evaluator). So all tasks of a role have the same values, and need only one pod template.
"""

from __future__ import annotations

from datastore.training.frameworks import jax, mpi, mxnet, none, pytorch, tensorflow
from datastore.training.frameworks.base import Framework

FRAMEWORKS: dict[str, Framework] = {
    each.name: each
    for each in (
        tensorflow.FRAMEWORK,
        pytorch.FRAMEWORK,
        jax.FRAMEWORK,
        mxnet.FRAMEWORK,
        mpi.FRAMEWORK,
        none.FRAMEWORK,
    )
}
