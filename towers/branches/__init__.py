"""A tower of several devices that compute the independent branches of a model's blocks at the same time.

    CPU:0   stem -+- 1x1, its backward pass and update --------+- join -> ... -> loss, everything else
    CPU:1         +- 3x3, its backward pass and update --------+
                  +- pool, 1x1, backward pass and update ------+

All is one graph. Between devices travel the fork's tensor, a branch's output, and their gradients.
"""
