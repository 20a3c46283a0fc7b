"""The theory: what the papers can compute about a random network, in numpy and scipy only, never torch.

`sounding.predict` is its public face. The parts, lowest first:

- `integrals`: expectations of functions of one or two Gaussian or spherical variables, each with an error.
- `kernel`, `kernel_path`: kernel maps and their sequences (thesis2024 ch. 5).
- `length`, `vanilla`, `critical`: plain networks, order and chaos, the edge between them.
- `eigenvalues`, `collapse`, `batchnorm`: batch normalization at any eps (meanfield2019).
- `homogeneous`, `gegenbauer`: closed forms and series, the independent second routes to it.
- `covariance_map`, `identity`, `backward`, `broken_symmetry`: any input covariance, gradients, what lies beyond BSB1.
- `gram`, `gram_deviation`: the Gram matrix of a batch over depth, and at finite width (thesis2024 ch. 3).
- `blocks`, `residual`: residual networks and transformers in closed form, tokens all alike in law.
- `signal`: the Gram calculus, for any architecture.
- `bounds`: the theorems of rank2020, orth2021 and thesis2024 as functions.
- `landscape`, `prescribe`, `prescribe_blocks`: the inverse problem, which change reaches a depth.
"""
