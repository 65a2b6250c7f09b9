"""The frameworks: what each tells its processes about each other. To add one, write a module like `jax.py`, name it
here, and in `framework` of datastore/api/trainingjob.py.

Everything in them is pure: from a topology to variables and files. Two variables are there for every task, and the
values of a framework may refer to them as Kubernetes does, by $(NAME): DATASTORE_INDEX, the index in the role, and
DATASTORE_RANK (0 for ps and evaluator). So one text serves all tasks of a role, and one pod template, too.
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
