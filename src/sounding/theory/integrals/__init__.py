"""Expectations of functions of one or two Gaussian or spherical variables, each with an error; no word of networks.

A normalized vector is x = √B·u/√(|u|² + B·eps) for a Gaussian u of B numbers that add up to 0. The files, lowest first:

- `panels`, `cells`, `means`: adaptive Gauss–Legendre on a line and in the plane of two coordinates.
- `quadrature`: Gaussian and spherical expectations of any function, the part that users call.
- `normalized`, `affine`: the law of one and two coordinates of a normalized vector, and φ(scale·x + shift).
- `table`, `polynomials`, `sketch`: φ on panels, expanded in polynomials, and on circles.
- `moments`: all moments of φ and its derivative that theory asks for, by the method that suits them.
- `arc_cosine`, `hermite`, `projected`: closed forms, series, and normalized vectors of any covariance.
"""
