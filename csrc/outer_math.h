// The element updates of the outer optimizers, and their constants, computed once on the host in double.
#pragma once

#include "portable.h"

namespace wsd {

struct AdamHyper {
  double lr, beta1, beta2, eps, weight_decay;
  double gate;    // multiplies the gradient before both moments (CGAD's sigma)
  int64_t step;   // number of this step, from 1
  uint64_t seed;  // of the stochastic rounding
};

// AdamW as torch defines it,
//   p = p * (1 - lr wd);  p -= lr / bc1 * m / (sqrt(v) / sqrt(bc2) + eps),  bc_i = 1 - beta_i^step
// with sqrt(bc2) moved to the other side: p -= lr sqrt(bc2) / bc1 * m / (sqrt(v) + eps sqrt(bc2)).
struct AdamConstants {
  float beta1, gradient_to_m;       // m' = beta1 m + gradient_to_m g,  gradient_to_m = (1 - beta1) gate
  float beta2, gradient_to_root_v;  // v' = beta2 v + (gradient_to_root_v g)^2,  = sqrt(1 - beta2) gate
  float eps_before, eps;            // eps sqrt(bc2) of the step before and of this one
  float keep, minus_lr;             // 1 - lr wd,  -lr sqrt(bc2) / bc1
};

// Multiplication alone, so that every machine's libm agrees.
static inline double integer_power(double base, int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1, base *= base) {
    if (exponent & 1) result *= base;
  }
  return result;
}

static inline AdamConstants adam_constants(const AdamHyper& h) {
  const double bc1 = 1.0 - integer_power(h.beta1, h.step);
  const double bc2 = 1.0 - integer_power(h.beta2, h.step);
  const double bc2_before = 1.0 - integer_power(h.beta2, h.step - 1);
  AdamConstants c;
  c.beta1 = static_cast<float>(h.beta1);
  c.gradient_to_m = static_cast<float>((1.0 - h.beta1) * h.gate);
  c.beta2 = static_cast<float>(h.beta2);
  c.gradient_to_root_v = static_cast<float>(std::sqrt(1.0 - h.beta2) * h.gate);
  c.eps_before = static_cast<float>(h.eps * std::sqrt(bc2_before));
  c.eps = static_cast<float>(h.eps * std::sqrt(bc2));
  c.keep = static_cast<float>(1.0 - h.lr * h.weight_decay);
  c.minus_lr = static_cast<float>(-h.lr * std::sqrt(bc2) / bc1);
  return c;
}

struct AdamElement {
  float p, m, v, s, r;  // parameter, moments, sqrt(v), update m / (s + eps)
};

// Takes the old moments already decayed: beta1 m and beta2 v.
WSD_FN AdamElement adam_element(float p, float g, float decayed_m, float decayed_v, const AdamConstants& c) {
  AdamElement e;
  const float root_gain = mul(c.gradient_to_root_v, g);
  e.m = add(decayed_m, mul(c.gradient_to_m, g));
  e.v = add(decayed_v, mul(root_gain, root_gain));
  e.s = root(e.v);
  e.r = div(e.m, add(e.s, c.eps));
  e.p = add(mul(p, c.keep), mul(c.minus_lr, e.r));
  return e;
}

struct SgdHyper {
  double lr, momentum, weight_decay;
  bool nesterov;
  int64_t step;   // of the rounding of a bf16 anchor
  uint64_t seed;  // likewise
};

struct SgdConstants {
  float minus_lr, momentum, weight_decay;
  bool nesterov;
};

static inline SgdConstants sgd_constants(const SgdHyper& h) {
  return SgdConstants{static_cast<float>(-h.lr), static_cast<float>(h.momentum),
                      static_cast<float>(h.weight_decay), h.nesterov};
}

// torch's SGD with dampening 0: g += wd p; buf = mu buf + g; p -= lr (nesterov ? g + mu buf : buf).
// A buffer of zeros gives torch's first step, buf = g.
struct SgdElement {
  float p, buffer;
};

WSD_FN SgdElement sgd_element(float p, float g, float buffer, const SgdConstants& c) {
  SgdElement e;
  g = add(g, mul(c.weight_decay, p));
  e.buffer = add(mul(c.momentum, buffer), g);
  e.p = add(p, mul(c.minus_lr, c.nesterov ? add(g, mul(c.momentum, e.buffer)) : e.buffer));
  return e;
}

struct MomentumHyper {
  double lr, momentum, weight_decay;
  int64_t period;
  int64_t step;   // number of this step, from 1: of the period and of all rounding
  uint64_t seed;  // of the rounding
};

struct MomentumConstants {
  float minus_lr, momentum, weight_decay;
  float share;  // 1 / period
  bool renew;   // whether this step ends a period
};

static inline MomentumConstants momentum_constants(const MomentumHyper& h) {
  MomentumConstants c;
  c.minus_lr = static_cast<float>(-h.lr);
  c.momentum = static_cast<float>(h.momentum);
  c.weight_decay = static_cast<float>(h.weight_decay);
  c.share = static_cast<float>(1.0 / static_cast<double>(h.period));
  c.renew = h.step % h.period == 0;
  return c;
}

// Delayed Nesterov (Liu et al., arXiv 2401.09135, Algorithm 3 with c = 0) with period N: g += wd p, then
//   at the end of a period:  m = mu m + (d + g) / N;  d = 0;  p -= lr (mu m + g / N)
//   else:                    d = d + g;                       p -= lr g / N
// With N = 1 and d = 0 it is SGD with Nesterov's momentum, as above.
struct MomentumElement {
  float p, momentum, buffer;
};

template <bool renew>
WSD_FN MomentumElement momentum_element(float p, float g, float momentum, float buffer,
                                        const MomentumConstants& c) {
  g = add(g, mul(c.weight_decay, p));
  const float sum = add(buffer, g);
  float step = mul(c.share, g);
  if (renew) {
    momentum = add(mul(c.momentum, momentum), mul(c.share, sum));
    step = add(step, mul(c.momentum, momentum));
  }
  return MomentumElement{add(p, mul(c.minus_lr, step)), momentum, renew ? 0.0f : sum};
}

}  // namespace wsd
