"""What label smoothing adds to dz beside a multiple of p, - smooth_i * w_v: of rank one, so it never meets a panel of
exponentials.

With S = sum_v w_v c_v and T = sum_i smooth_i e_i, both [D], it is - smooth_i * S in dE and - w_v * T in dC: where all
classes weigh the same, one row for all of dC, which joins a product before that is rounded.
"""


class Smoothing:
    """Over the classes up to `stop`, and the tokens that are added."""

    def __init__(self, backend, problem, smooth, stop=None):
        self.column_sum, self.smooth, self.factor = backend.column_sum, smooth, problem.scale / problem.temperature
        c, weight = problem.c[:stop], None if problem.weight is None else problem.weight[:stop]
        self.weighs_alike = weight is None
        self.weight = (smooth.new_ones(len(c)) if weight is None else weight.float()) * self.factor
        self.classes = self.column_sum(c, weight).mul_(self.factor)
        self.tokens = self.classes.new_zeros(len(self.classes))

    def add(self, e, i0, i1):
        self.tokens += self.column_sum(e, self.smooth[i0:i1])

    def of_rows(self, i0, i1, columns=slice(None)):
        return self.smooth[i0:i1], self.classes[columns]

    def of_classes(self, ids=slice(None)):
        return self.weight[ids], self.tokens

    def of_every_class(self):
        """- w * T, or None where classes weigh differently."""
        return self.tokens * -self.factor if self.weighs_alike else None

    def of_bias(self):
        return self.weight * self.smooth.sum()

    def value(self, problem, lse):
        value = problem.total_weight * (self.smooth * lse).sum() - (self.tokens * self.classes).sum()
        if problem.bias is None:
            return value
        return value - (self.weight * problem.bias.float()).sum() * self.smooth.sum()
