// The functions of korch_math.h on vectors of 16 for AVX-512. Powers of two are looked up in a table
// in a register. tanh and erf are polynomials whose coefficients are also looked up. A quotient is computed by
// an approximate inverse (vrcp14ps, 14 bits) and a Newton step, because a division of 16 numbers takes 10 cycles
// or more, in which 20 other instructions could be executed.
#pragma once

namespace korch::avx512 {

using Floats = Vec<float, 16>;
using Integers = Vec<int32_t, 16>;

KORCH_INLINE Floats number(float x) { return splat<float, 16>(x); }
KORCH_INLINE Integers bits_of(Floats x) { return reinterpret_cast<Integers>(x); }
KORCH_INLINE Floats float_of(Integers x) { return reinterpret_cast<Floats>(x); }

// a b + c, rounded once, regardless of the compiler's settings for contraction.
KORCH_INLINE Floats fused(Floats a, Floats b, Floats c) {
  return __builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4);
}

// The entries of a table at the low bits of the indices: four bits for 16 entries, five for 32.
KORCH_INLINE Floats entries(Floats table, Integers indices) {
#if defined(__clang__)
  return __builtin_ia32_permvarsf512(table, indices);
#else
  return __builtin_ia32_permvarsf512_mask(table, indices, table, -1);
#endif
}
KORCH_INLINE Floats entries(const float (&table)[32], Integers indices) {
  const Floats low = load<float, 16>(table), high = load<float, 16>(table + 16);
#if defined(__clang__)
  return __builtin_ia32_vpermi2varps512(low, indices, high);
#else
  return __builtin_ia32_vpermt2varps512_mask(indices, low, high, -1);
#endif
}

// The remainder of x after rounding it to eighths.
KORCH_INLINE Floats less_eighths(Floats x) {
#if defined(__clang__)
  return __builtin_ia32_reduceps512_mask(x, 3 << 4 | 8, x, -1, 4);
#else
  return __builtin_ia32_reduceps512_mask(x, 3 << 4 | 8, x, -1);
#endif
}

// A polynomial whose coefficients, lowest first, are looked up in the rows of a table.
template <int N>
KORCH_INLINE Floats polynomial(const float (&table)[N][32], Integers indices, Floats r) {
  Floats y = entries(table[N - 1], indices);
#pragma GCC unroll 8
  for (int i = N - 2; i >= 0; --i) y = y * r + entries(table[i], indices);
  return y;
}

KORCH_INLINE Floats with_sign(Floats size, Floats sign) {  // size | sign & mask
  const Integers mask = splat<int32_t, 16>(static_cast<int32_t>(0x80000000));
  return float_of(__builtin_ia32_pternlogd512_mask(bits_of(size), bits_of(sign), mask, 0xf8, -1));
}

// Adding this number rounds to sixteenths; the sum's low bits are then the number of sixteenths.
inline constexpr float SIXTEENTHS = 1.5f * (1 << 19);

// 2^(j / 16)
alignas(64) inline constexpr float ROOTS[16] = {
    1.0f, 1.04427373f, 1.09050775f, 1.13878858f, 1.18920708f, 1.24185777f,
    1.29683959f, 1.35425556f, 1.41421354f, 1.47682619f, 1.54221082f, 1.61049032f,
    1.68179286f, 1.75625217f, 1.8340081f, 1.91520655f};

// e^x = 2^n e^r for n in sixteenths and |r| <= ln 2 / 32, where x is not less than `least`, and 0 elsewhere;
// x is at most 10^4. The product with 2^floor(n) rounds to subnormal numbers and infinity. It takes 240 cycles
// if the result of a lane is too small, but not if that lane is masked out.
KORCH_INLINE Floats exp_from(float least, Floats x) {
  const auto is_not_less = __builtin_ia32_cmpps512_mask(x, number(least), 5, -1, 4);
  const Floats a = greater_of<float, 16>(number(least), x);
  const Floats shifted = a * number(1.44269504088896341f) + number(SIXTEENTHS);
  const Floats n = shifted - number(SIXTEENTHS), one = number(1.0f);
  const Floats r = a - n * number(0.693359375f) - n * number(-2.12194440054690583e-4f);
  const Floats p = (number(0.16666950285434723f) * r + number(0.5000162720680237f)) * r + one;
  const Floats root = entries(load<float, 16>(ROOTS), bits_of(shifted));
  const Floats y = root * r * p + root;
  return __builtin_ia32_scalefps512_mask(y, n, Floats{}, is_not_less, 4);
}

KORCH_INLINE Floats exp(Floats x) {
  return exp_from(-103.98f, less_of<float, 16>(number(89.0f), x));
}

// e^x for x <= 0; results below 2^-125 become 0, because subnormal numbers slow down all code that uses them.
KORCH_INLINE Floats exp_of_nonpositive(Floats x) { return exp_from(-87.0f, x); }

// Tables for 32 intervals of [1, 2) or [0.5, 1), indexed by the five highest bits of the fraction: the inverses of
// their centers, but 1 for the intervals next to 1; the negative logarithms of these inverses, rounded to units of
// 2^-16; and the rounding errors of these logarithms.
alignas(64) inline constexpr float INVERSES[32] = {
    1.0f, 1.0f, 0.927536249f, 0.901408434f, 0.876712322f, 0.853333354f, 0.83116883f,
    0.810126603f, 0.790123463f, 0.771084309f, 0.752941191f, 0.735632181f, 0.719101131f, 0.703296721f,
    0.688172042f, 0.673684239f, 1.31958759f, 1.29292929f, 1.26732671f, 1.24271846f, 1.21904767f,
    1.19626164f, 1.17431188f, 1.15315318f, 1.13274336f, 1.11304343f, 1.09401715f, 1.07563031f,
    1.0578512f, 1.04065037f, 1.0f, 1.0f};
alignas(64) inline constexpr float LOGS[32] = {
    0.0f, 0.0f, 0.0752258301f, 0.103790283f, 0.131576538f, 0.158599854f, 0.184921265f,
    0.210571289f, 0.235565186f, 0.259963989f, 0.2837677f, 0.307022095f, 0.32975769f, 0.351974487f,
    0.373718262f, 0.394989014f, -0.277313232f, -0.256912231f, -0.236907959f, -0.217300415f, -0.198074341f,
    -0.179199219f, -0.160675049f, -0.142501831f, -0.124649048f, -0.10710144f, -0.0898590088f, -0.0729064941f,
    -0.0562438965f, -0.0398406982f, 0.0f, 0.0f};
alignas(64) inline constexpr float LOGS_REST[32] = {
    0.0f, 0.0f, -2.42746705e-06f, 6.52910512e-06f, -1.7284664e-07f, 5.15244665e-06f, 1.07477695e-06f,
    -6.54510086e-06f, 8.78315291e-07f, -6.42756777e-06f, 4.53377567e-07f, 2.94429356e-06f, -4.41430166e-06f, 1.91070671e-06f,
    -1.85099384e-06f, 4.75172828e-06f, -6.02226055e-06f, 1.81859161e-06f, -1.7722615e-06f, -8.6996414e-07f, 4.388874e-06f,
    -2.17904267e-06f, -7.29002159e-06f, 1.74423303e-06f, 6.60636942e-06f, 3.35050822e-06f, 2.63030711e-06f, -3.27890206e-07f,
    4.22007088e-06f, -5.17305216e-06f, 0.0f, 0.0f};

// log x = e ln 2 + log m for m in [0.75, 1.5): m times a center's inverse is 1 + r. The sum of the terms in
// units of 2^-16 is exact. For 0 and infinity, the exponent and m are as needed: -infinity or infinity, and 1.
KORCH_INLINE Floats log(Floats x) {
  // NaN if x < 0.
  const Floats m = __builtin_ia32_getmantps512_mask(x, 3 | 3 << 2, x, -1, 4);
  const Floats e = __builtin_ia32_getexpps512_mask(x, x, -1, 4) - __builtin_ia32_getexpps512_mask(m, m, -1, 4);
  const Integers indices = bits_of(m) >> 18;
  const Floats r = fused(m, entries(INVERSES, indices), number(-1.0f));
  const Floats h = ((number(0.1886608f) * r + number(-0.250074595f)) * r + number(0.33334437f)) * r +
                   number(-0.5f);
  const Floats low = e * number(1.42860677e-06f) + entries(LOGS_REST, indices);
  const Floats high = e * number(0.693145751953125f) + entries(LOGS, indices);
  return high + (r + (r * r * h + low));
}

// The bits of 2^(j / 16) / BASE, minus j << 19.
inline constexpr float BASE = 0.975169837f;
alignas(64) inline constexpr int32_t ROOTS_WITHOUT[16] = {
    0x3f83425a, 0x3f81120e, 0x3f7f23a0, 0x3f7d79fa, 0x3f7c1828, 0x3f7b0158,
    0x3f7a38dc, 0x3f79c22c, 0x3f79a0e7, 0x3f79d8d5, 0x3f7a6de9, 0x3f7b6443,
    0x3f7cc032, 0x3f7e8634, 0x3f80bafc, 0x3f836372};

// 1 / (1 + e^-x), 0 below -88.4.
KORCH_INLINE Floats sigmoid(Floats x) {
  // e^-x = 2^n e^-r. The product n a is exact. Using the float nearest to ln 2 / a in (n a) (ln 2 / a)
  // causes an error of n 10^-11, the least among all a of 12 bits.
  constexpr float A = 2579.0f / 4096, LN2_BY_A = 0x1.19d24ap+0f;
  const Floats one = number(1.0f), bounded = less_of<float, 16>(number(64.0f), x);  // 1 + e^-64 is 1
  const Floats shifted = bounded * number(-1.44269504088896341f) + number(SIXTEENTHS);
  const Floats r = fused(fused(shifted, number(A), number(-SIXTEENTHS * A)), number(LN2_BY_A), bounded);
  // After the shift, the integer part of n is at the exponent's bits, with j below it. This is 2^n / BASE.
  const Integers n = bits_of(shifted), without = load<int32_t, 16>(ROOTS_WITHOUT);
  const Floats power = float_of(bits_of(entries(float_of(without), n)) + (n << 19));
  // BASE e^-r is less than 1, where the rounding error is half as large as above 1.
  const Floats p = ((number(-0.162531123f) * r + number(0.487600744f)) * r - number(BASE)) * r + number(BASE);
  const Floats sum = power * p + one;
  const Floats inverse = __builtin_ia32_rcp14ps512_mask(sum, sum, -1);
  const auto is_not_less = __builtin_ia32_cmpps512_mask(x, number(-88.4f), 5, -1, 4);
  return __builtin_ia32_vfmaddps512_maskz(inverse, fused(-inverse, sum, one), inverse, is_not_less, 4);
}

// Polynomials for tanh on quarters of octaves from 2^-4 to 9.02, indexed by the low bits of the exponent and the next
// two bits; the first interval begins at 0. The center of an interval is, of the numbers near its middle, the one whose
// tanh is nearest to a float.
alignas(64) inline constexpr float TANH_CENTERS[32] = {
    2.24546003f, 2.74547005f, 3.24603248f, 3.74528003f, 4.49024487f, 5.49063492f, 6.49241495f,
    7.50999498f, 8.52529526f, 9.0f, 9.0f, 9.0f, 0.0f, 0.0858064815f, 0.101457112f, 0.117045701f,
    0.140344381f, 0.171569213f, 0.202819839f, 0.234081715f, 0.2807675f, 0.343209684f,
    0.40564844f, 0.468255013f, 0.561490595f, 0.686293125f, 0.811442494f, 0.936533153f,
    1.12317002f, 1.37255502f, 1.62259376f, 1.87271869f};
alignas(64) inline constexpr float TANH[6][32] = {
    {0.977827907f, 0.991785944f, 0.996973753f, 0.998883963f, 0.999748349f, 0.999965966f,
     0.99999541f, 0.999999404f, 0.99999994f, 1.0f, 1.0f, 1.0f, 0.0f, 0.0855965093f, 0.101110421f,
     0.116514117f, 0.13943015f, 0.169905365f, 0.200083792f, 0.229897946f, 0.273615271f,
     0.330339849f, 0.384771585f, 0.436788321f, 0.509082556f, 0.59559536f, 0.670385242f,
     0.733625352f, 0.808668733f, 0.879273176f, 0.924999595f, 0.953839958f},
    {0.0438525714f, 0.0163606368f, 0.00604333496f, 0.0022308284f, 0.000503240619f,
     6.80679805e-05f, 9.17954276e-06f, 1.19939148e-06f, 1.57428232e-07f, 0.0f, 0.0f, 0.0f, 1.0f,
     0.992673218f, 0.989776671f, 0.986424446f, 0.98055923f, 0.971132159f, 0.959966481f,
     0.947146952f, 0.925134659f, 0.890875578f, 0.851950824f, 0.809215963f, 0.740834951f,
     0.645266175f, 0.550583601f, 0.46179384f, 0.346054882f, 0.226878688f, 0.144375756f,
     0.0901893377f},
    {-0.0428790674f, -0.0162253305f, -0.0060246354f, -0.002228169f, -0.000502502022f,
     -6.79844525e-05f, -9.17190846e-06f, -1.31349134e-06f, -7.28884572e-07f, 0.0f, 0.0f, 0.0f,
     3.00233403e-08f, -0.0849681497f, -0.100074068f, -0.114930652f, -0.136720031f, -0.165000543f,
     -0.19207409f, -0.217747629f, -0.253131568f, -0.294291496f, -0.327806205f, -0.353455901f,
     -0.377145857f, -0.384317666f, -0.369102865f, -0.338784069f, -0.279845744f, -0.19948943f,
     -0.133547843f, -0.0860262886f},
    {0.0273135044f, 0.0106398696f, 0.00399243319f, 0.00148228521f, 0.000335120014f,
     4.53555876e-05f, 6.11660334e-06f, 7.89592093e-07f, 6.06140205e-08f, 0.0f, 0.0f, 0.0f,
     -0.333336771f, -0.322452337f, -0.31917569f, -0.314597607f, -0.307748675f, -0.29554987f,
     -0.281621426f, -0.265922546f, -0.23902899f, -0.199719414f, -0.157843858f, -0.115352653f,
     -0.0549464561f, 0.013803063f, 0.0639368519f, 0.0946112797f, 0.110948384f, 0.0997770354f,
     0.0754050165f, 0.0519916192f},
    {-0.0124758882f, -0.00519093405f, -0.00199318165f, -0.000746266742f, -0.000175293462f,
     -2.37449785e-05f, -3.19144442e-06f, 4.1007322e-08f, 2.09045174e-06f, 0.0f, 0.0f, 0.0f,
     0.0001164977f, 0.0337773003f, 0.0202865619f, 0.0441824272f, 0.0906533673f, 0.105232991f,
     0.121902823f, 0.135957092f, 0.150497198f, 0.163783938f, 0.169674173f, 0.167961404f,
     0.153473958f, 0.1198726f, 0.0801364332f, 0.0436895527f, 0.00396525487f, -0.021001067f,
     -0.0251512881f, -0.0209013186f},
    {0.00397688802f, 0.00191575324f, 0.000771321822f, 0.000293013989f, 6.85832201e-05f,
     9.31748127e-06f, 1.25942677e-06f, 2.41967314e-07f, 3.59017747e-07f, 0.0f, 0.0f, 0.0f,
     0.132015869f, -13.9813042f, -6.95322132f, -9.29637051f, -0.00664119096f, -0.304775298f,
     0.270200104f, 0.880555511f, -0.00624868553f, 0.0152959721f, -0.00021741321f, -0.0172941666f,
     -0.043382816f, -0.0605922379f, -0.0669828728f, -0.053599406f, -0.0321197473f,
     -0.00951575767f, 0.00142809784f, 0.00462889299f},
};

KORCH_INLINE Floats tanh(Floats x) {
  const Floats size = float_of(bits_of(x) & 0x7fffffff);
  const Floats a = less_of<float, 16>(number(9.02f), size);
  const Integers indices = bits_of(greater_of<float, 16>(number(0.0625f), a)) >> 21;
  const Floats r = a - entries(TANH_CENTERS, indices);
  return with_sign(polynomial(TANH, indices, r), x);
}

// Polynomials for erf around multiples of 1/8, from 0 to 3.925, beyond which the result rounds to 1.
alignas(64) inline constexpr float ERF[5][32] = {
    {0.0f, 0.140316203f, 0.276326388f, 0.404116899f, 0.520499885f, 0.623240888f, 0.711155653f,
     0.784075081f, 0.842700779f, 0.888388216f, 0.92290014f, 0.948170066f, 0.966105163f,
     0.978443742f, 0.986671686f, 0.99199003f, 0.995322287f, 0.997345984f, 0.998537302f,
     0.999217033f, 0.999593019f, 0.999794602f, 0.999899387f, 0.999952137f, 0.999977887f,
     0.999990106f, 0.999995708f, 0.999998212f, 0.999999285f, 0.999999702f, 0.999999881f,
     0.99999994f},
    {1.12837911f, 1.11088479f, 1.06001377f, 0.980352759f, 0.87878257f, 0.763499558f, 0.642931104f,
     0.524745047f, 0.415107489f, 0.318273962f, 0.236521125f, 0.170359775f, 0.118930288f,
     0.0804722607f, 0.0527749956f, 0.0335458256f, 0.0206669848f, 0.0123408204f, 0.00714231888f,
     0.00400647754f, 0.00217828364f, 0.00114787428f, 0.000586277223f, 0.000290228199f,
     0.000139251191f, 6.47586712e-05f, 2.91884317e-05f, 1.27514231e-05f, 5.39926759e-06f,
     2.21584378e-06f, 8.81396488e-07f, 3.39941266e-07f},
    {2.17278084e-05f, -0.138856038f, -0.265000015f, -0.367614448f, -0.43940419f, -0.47719565f,
     -0.482230783f, -0.45918414f, -0.415091634f, -0.358037025f, -0.295669138f, -0.234235615f,
     -0.178427443f, -0.130784661f, -0.0923857465f, -0.06284336f, -0.0413770191f, -0.0262496732f,
     -0.0161065459f, -0.00945886411f, -0.00538870692f, -0.00296935975f, -0.00163070997f,
     -0.000819030625f, -0.000371549017f, -0.000207083955f, -0.000117634503f, -9.80162513e-05f,
     -7.52972919e-05f, -2.19273647e-06f, 7.79953825e-06f, 3.33039497e-05f},
    {-0.377342463f, -0.358223557f, -0.308787346f, -0.23472859f, -0.146445364f, -0.0557610355f,
     0.0266109109f, 0.0927428454f, 0.138155624f, 0.162271917f, 0.167399585f, 0.157843843f,
     0.138721034f, 0.11483296f, 0.0901789889f, 0.0674794838f, 0.048265174f, 0.0330727659f,
     0.0217591561f, 0.0137580093f, 0.00837041903f, 0.00490459288f, 0.00276942784f, 0.00150820659f,
     0.00079306995f, 0.000401916739f, 0.000197042013f, 9.32288604e-05f, 4.26194165e-05f,
     1.88298745e-05f, 8.04214778e-06f, -1.55060786e-06f},
    {0.021421805f, 0.0672989637f, 0.125974417f, 0.162412331f, 0.185923859f, 0.178102359f,
     0.158248618f, 0.119330503f, 0.0660536587f, 0.0236222316f, -0.00231274473f, -0.0322918259f,
     -0.0367718861f, -0.0452962667f, -0.0406031497f, -0.0561808571f, -0.0235844553f,
     -0.020082945f, -0.00992310047f, -0.027471751f, -0.0230681598f, -0.0165211651f,
     0.00141089736f, -0.0057792007f, -0.0127788782f, 0.000636141631f, 0.00549370097f,
     0.0138173969f, 0.0142524634f, -0.00151414529f, -0.00283359084f, -0.00890668295f},
};

KORCH_INLINE Floats erf(Floats x) {
  const Floats size = float_of(bits_of(x) & 0x7fffffff);
  const Floats a = less_of<float, 16>(number(3.925f), size);
  const Floats shifted = a + number(1.5f * (1 << 20));  // rounds to eighths; the low bits are their number
  return with_sign(polynomial(ERF, bits_of(shifted), less_eighths(a)), x);
}

}  // namespace korch::avx512
