// float32 functions on vectors: exp, log, tanh, erf, sigmoid.
// Each is a minimax polynomial after a range reduction of the argument; docs/numerics.md states the
// measured errors. NaN propagates; infinities give the limits. With AVX-512, vectors of 16 lanes use
// other methods, in korch_math_avx512.h.
#pragma once

#include "korch_vector.h"

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#include "korch_math_avx512.h"
#define KORCH_WHERE_AVX512(FUNCTION) \
  if constexpr (W == 16) return avx512::FUNCTION(x);
#else
#define KORCH_WHERE_AVX512(FUNCTION)
#endif

namespace korch {

template <int W>
using F = Vec<float, W>;
template <int W>
using I = Vec<int32_t, W>;

template <int W>
KORCH_INLINE I<W> bits_of(F<W> x) {
  I<W> y;
  __builtin_memcpy(&y, &x, sizeof(y));
  return y;
}

template <int W>
KORCH_INLINE F<W> float_of(I<W> x) {
  F<W> y;
  __builtin_memcpy(&y, &x, sizeof(y));
  return y;
}

template <int W>
KORCH_INLINE F<W> number(float x) {
  return splat<float, W>(x);
}

// A NaN fails both comparisons and is kept.
template <int W>
KORCH_INLINE F<W> clamped(F<W> x, float least, float most) {
  F<W> low = number<W>(least), high = number<W>(most);
  return less_of<float, W>(high, greater_of<float, W>(low, x));
}

// Horner's rule, highest coefficient first.
template <int W, typename... Rest>
KORCH_INLINE F<W> polynomial(F<W> x, float first, Rest... rest) {
  F<W> y = number<W>(first);
  ((y = y * x + number<W>(rest)), ...);
  return y;
}

// x 2^n for an integer n of -152 to 128, which is passed as the number 1.5 * 2^23 + n; 0 if n is -152.
template <int W>
KORCH_INLINE F<W> scaled(F<W> x, F<W> shifted) {
  // Two factors of about 2^(n/2), so that neither overflows or underflows before the product does. The second
  // factor is 0 for the least n: a subnormal product would take 150 cycles.
  I<W> k = bits_of<W>(shifted) - bits_of<W>(number<W>(12582912.0f));
  I<W> half = k >> 1;
  F<W> one = float_of<W>((half + (127 + 51)) << 23);
  F<W> two = float_of<W>((k - half + (127 - 51)) << 23);
  return x * one * two;
}

template <int W>
KORCH_INLINE F<W> exp_float(F<W> x) {
  KORCH_WHERE_AVX512(exp)
  // Beyond these the result is 0 or infinite.
  F<W> a = clamped<W>(x, -105.4f, 89.0f);
  // a = n ln 2 + r; adding 1.5 * 2^23 rounds to the nearest integer.
  F<W> magic = number<W>(12582912.0f);
  F<W> shifted = a * number<W>(1.44269504088896341f) + magic;
  F<W> n = shifted - magic;
  F<W> r = a - n * number<W>(0.693359375f) - n * number<W>(-2.12194440054690583e-4f);
  F<W> p = polynomial<W>(r, 1.395171725e-03f, 8.369598410e-03f, 4.166618728e-02f, 1.666651289e-01f,
                         5.000000101e-01f);
  F<W> one = number<W>(1.0f);
  return scaled<W>((p * r + one) * r + one, shifted);
}

// e^x for x <= 0; results below 2^-125 become 0. This suffices for a softmax, and is faster.
template <int W>
KORCH_INLINE F<W> exp_of_nonpositive(F<W> x) {
  KORCH_WHERE_AVX512(exp_of_nonpositive)
  F<W> low = number<W>(-87.0f), zero = number<W>(0.0f), one = number<W>(1.0f);
  F<W> a = greater_of<float, W>(low, x);
  // Adding `magic` rounds; as it includes the exponent bias, the sum's low bits are the exponent bits of 2^n.
  F<W> magic = number<W>(12582912.0f + 127.0f);
  F<W> shifted = a * number<W>(1.44269504088896341f) + magic;
  F<W> n = shifted - magic;
  F<W> r = a - n * number<W>(0.693359375f) - n * number<W>(-2.12194440054690583e-4f);
  F<W> p = polynomial<W>(r, 1.395171725e-03f, 8.369598410e-03f, 4.166618728e-02f, 1.666651289e-01f,
                         5.000000101e-01f);
  F<W> y = ((p * r + one) * r + one) * float_of<W>(bits_of<W>(shifted) << 23);
  return x < low ? zero : y;
}

template <int W>
KORCH_INLINE F<W> log_float(F<W> x) {
  KORCH_WHERE_AVX512(log)
  // Denormals are scaled up first.
  F<W> tiny = number<W>(1.17549435e-38f);
  F<W> zero = number<W>(0.0f);
  F<W> scaled = x < tiny ? x * number<W>(8388608.0f) : x;
  F<W> offset = x < tiny ? number<W>(23.0f) : zero;
  // scaled = 2^e m with m in [sqrt(1/2), sqrt(2)).
  I<W> b = bits_of<W>(scaled) - 0x3f3504f3;
  I<W> e = b >> 23;
  F<W> m = float_of<W>((b & 0x007fffff) + 0x3f3504f3);
  F<W> exponent = cast<float, int32_t, W>(e) - offset;
  F<W> f = m - number<W>(1.0f);
  F<W> p = polynomial<W>(f, 6.915125880e-02f, -1.178968486e-01f, 1.187302006e-01f,
                         -1.238437238e-01f, 1.421865518e-01f, -1.666924933e-01f, 2.000222671e-01f,
                         -2.499998663e-01f, 3.333331044e-01f);
  F<W> small = p * f * f * f - number<W>(0.5f) * f * f;
  F<W> y = exponent * number<W>(-2.12194440054690583e-4f) + small + f;
  y = y + exponent * number<W>(0.693359375f);
  F<W> infinity = number<W>(__builtin_inff());
  y = x == infinity ? x : y;
  y = x == zero ? -infinity : y;
  return x >= zero ? y : number<W>(__builtin_nanf(""));
}

template <int W>
KORCH_INLINE F<W> magnitude(F<W> x) {
  return float_of<W>(bits_of<W>(x) & 0x7fffffff);
}

template <int W>
KORCH_INLINE F<W> with_sign(F<W> size, F<W> sign) {
  I<W> mask = splat<int32_t, W>(static_cast<int32_t>(0x80000000));
  return float_of<W>(bits_of<W>(size) | (bits_of<W>(sign) & mask));
}

template <int W>
KORCH_INLINE F<W> tanh_float(F<W> x) {
  KORCH_WHERE_AVX512(tanh)
  F<W> a = magnitude<W>(x), z = a * a;
  F<W> p = polynomial<W>(z, -5.717036561e-03f, 2.065057900e-02f, -5.374349526e-02f,
                         1.333149125e-01f, -3.333328392e-01f);
  F<W> small = p * z * a + a;
  F<W> capped = a > number<W>(20.0f) ? number<W>(20.0f) : a;
  F<W> large = number<W>(1.0f) -
               number<W>(2.0f) / (exp_float<W>(capped + capped) + number<W>(1.0f));
  F<W> y = a < number<W>(0.625f) ? small : large;
  return x != x ? x : with_sign<W>(y, x);
}

template <int W>
KORCH_INLINE F<W> erf_float(F<W> x) {
  KORCH_WHERE_AVX512(erf)
  // An odd rational function; beyond 3.95 the result rounds to 1.
  F<W> one = number<W>(1.0f), a = clamped<W>(x, -3.95f, 3.95f);
  F<W> z = a * a;
  F<W> p = polynomial<W>(z, 2.025857156695565e-06f, 2.8466727e-04f, 3.8076851e-03f, 5.2873943e-02f,
                         1.9154061e-01f, 1.1283791e+00f);
  F<W> q = polynomial<W>(z, 3.7830199e-05f, 1.1705920e-03f, 1.5054142e-02f, 1.1455542e-01f,
                         5.0308114e-01f, 1.0f);
  F<W> y = a * p / q;
  return clamped<W>(y, -1.0f, 1.0f);
}

template <int W>
KORCH_INLINE F<W> sigmoid_float(F<W> x) {
  KORCH_WHERE_AVX512(sigmoid)
  // 1 / (1 + e^-x). Beyond these the result is 1 or 0.
  F<W> a = clamped<W>(x, -89.0f, 87.0f);
  // -a = n ln 2 - r. Adding `magic` rounds; as it includes the exponent bias, the sum's low bits are the
  // exponent bits of 2^n, which is infinite from n = 128 on.
  F<W> magic = number<W>(12582912.0f + 127.0f);
  F<W> shifted = a * number<W>(-1.44269504088896341f) + magic;
  F<W> n = shifted - magic;
  F<W> r = a + n * number<W>(0.693359375f) + n * number<W>(-2.12194440054690583e-4f);
  F<W> p = polynomial<W>(r, 1.395171725e-03f, -8.369598410e-03f, 4.166618728e-02f, -1.666651289e-01f,
                         5.000000101e-01f);
  F<W> one = number<W>(1.0f);
  F<W> y = (p * r - one) * r + one;
  F<W> power = float_of<W>(bits_of<W>(shifted) << 23);
  return one / (y * power + one);
}

#undef KORCH_WHERE_AVX512

}  // namespace korch
