"""The numbers of constants in the C interface of oneDNN 3, which never change within that version."""

from __future__ import annotations

ALGORITHMS = {
    "convolution_direct": 1,
    "convolution_auto": 3,
    "deconvolution_direct": 10,
    "eltwise_relu": 32,
    "eltwise_tanh": 33,
    "eltwise_elu": 34,
    "eltwise_square": 35,
    "eltwise_abs": 36,
    "eltwise_sqrt": 37,
    "eltwise_linear": 38,
    "eltwise_soft_relu": 39,
    "eltwise_hardsigmoid": 40,
    "eltwise_logistic": 41,
    "eltwise_exp": 42,
    "eltwise_gelu_tanh": 43,
    "eltwise_swish": 44,
    "eltwise_log": 45,
    "eltwise_clip": 46,
    "eltwise_clip_v2": 47,
    "eltwise_pow": 48,
    "eltwise_gelu_erf": 49,
    "eltwise_round": 50,
    "eltwise_mish": 51,
    "eltwise_hardswish": 52,
    "pooling_max": 511,
    "pooling_avg_include_padding": 767,
    "pooling_avg_exclude_padding": 1023,
    "binary_add": 131056,
    "binary_mul": 131057,
    "binary_max": 131058,
    "binary_min": 131059,
    "binary_div": 131060,
    "binary_sub": 131061,
}

QUERIES = {
    "impl_info_str": 8,
    "strides": 14,
    "weights_md": 131,
    "scratchpad_md": 136,
    "ndims_s32": 256,
    "dims": 257,
    "padded_dims": 260,
    "format_kind": 262,
    "inner_nblks_s32": 263,
    "inner_blks": 264,
    "inner_idxs": 265,
}

_TAGS = """
a ab abc abcd abcde abcdef abcdefg abcdefgh abcdefghi abcdefghij abcdefghijk abcdefghijkl ba acb bac bca cab cba abdc
acbd acdb adbc adcb bacd bcda cdab cdba dcab abced abdec acbde acdeb adecb bacde bcdea cdeab cdeba decab abcdfe abdefc
abdfce acbdef adefcb defcab abcdegf abcdefhg abcdefgih abcdefghji abcdefghikj abcdefghijlk Abc16a ABc16a16b ABc32a32b
ABc4a4b aBc16b ABc16b16a Abc4a aBc32b aBc4b ABc4b16a4b ABc2b8a4b ABc16b16a4b ABc16b16a2b ABc4b4a ABc8a16b2a ABc8a8b
ABc8a4b aBc8b ABc8b16a2b BAc8a16b2a ABc8b8a Abcd16a Abcd8a ABcd16a16b Abcd32a ABcd32a32b aBcd16b ABcd16b16a aBCd16b16c
aBCd16c16b Abcd4a aBcd32b aBcd4b ABcd4b16a4b ABcd16b16a4b ABcd16b16a2b ABcd4b4a ABcd4a4b aBCd2c4b2c aBCd4b8c2b
aBCd4c16b4c aBCd2c8b4c aBCd16c16b4c aBCd16c16b2c aBCd4c4b aBCd4b4c ABcd8a16b2a ABcd2b8a4b ABcd8a8b ABcd8a4b aBcd8b
aBCd4c8b2c ABcd8b16a2b aBCd8b16c2b BAcd8a16b2a ABcd8b8a aBCd8b8c aBCd8b4c aBCd8c16b2c ABcde8a16b2a aCBd8b16c2b
aBCd8c8b Abcde16a Abcde32a ABcde16a16b BAcde8a16b2a aBCd2b4c2b ABcde4b16a4b ABcde2b8a4b aBcde16b ABcde16b16a
aBCde16b16c aBCde16c16b aBCde2c8b4c Abcde4a aBcde32b aBcde4b ABcde4b4a ABcde4a4b aBCde4b4c aBCde2c4b2c aBCde4b8c2b
aBCde4c16b4c aBCde16c16b4c aBCde16c16b2c aBCde4c4b Abcde8a ABcde8a8b ABcde8a4b BAcde16b16a aBcde8b ABcde8b16a2b
aBCde8b16c2b aBCde4c8b2c aCBde8b16c2b ABcde8b8a ABcde32a32b aBCde8b8c aBCde8b4c ABc4a8b8a4b ABcd4a8b8a4b ABcde4a8b8a4b
BAc4b8a8b4a BAcd4b8a8b4a BAcde4b8a8b4a ABcd2a8b8a2b aBCd4b8c8b4c aBCde4b8c8b4c aBCde2b8c8b2c aBCde8c16b2c aBCde8c8b
aBCde2b4c2b aBcdef16b aBCdef16b16c aBCdef16c16b aBCdef4c16b4c aBCdef2c8b4c aBCdef4c8b2c aBCdef2b4c2b aBcdef4b
aBCdef4c4b aBCdef4b4c aBCdef2c4b2c aBCdef4b8c2b aBCdef8b8c aBCdef8b4c aBCdef8c16b2c aBCdef4b8c8b4c aBCdef8b16c2b
aCBdef8b16c2b aBCdef8c8b aBdc16b aBdC16b2c aBdC16b4c aBdc4b aBdc8b aBdec16b aBdeC16b2c aBdeC16b4c aBdec32b aBdec4b
aBdec8b aBdefc16b aBdefC16b2c aCBdef16c16b aBdefc4b aBdefc8b Abcdef16a Abcdef32a aBedc16b Acb16a AcB16a2b AcB16a4b
Acb4a Acb8a aCBd16b16c aCBd16c16b aCBde16b16c aCBde16c16b Acdb16a AcdB16a2b AcdB16a4b Acdb32a Acdb4a Acdb8a Acdeb16a
AcdeB16a2b Acdeb4a Acdeb8a Adcb16a BAc16a16b BAc16b16a BAcd16a16b BAcd16b16a aCBd4c8b8c4b aCBde4c8b8c4b aCBdef4c8b8c4b
BAcde16a16b aCBdef16b16c ABc16b32a ABc16b64a ABc4b32a4b ABc4b64a4b ABc8b32a2b ABc8b64a2b AB16b16a AB16b32a AB16b64a
AB8b16a2b AB8b32a2b AB8b64a2b AB4b16a4b AB4b32a4b AB4b64a4b AB16b16a4b ABcd16b32a ABcd16b64a ABcd4b32a4b ABcd4b64a4b
ABcd8b32a2b ABcd8b64a2b ABcde4b32a4b ABcde4b64a4b ABcde16b16a4b ABcde16b16a2b ABcde16b32a ABcde16b64a ABcde8b32a2b
ABcde8b64a2b aBCdef16c16b4c aBCdef16c16b2c AB32a32b8a4b AB8a4b AB32a32b8a2b AB8a2b abDc32d abDC32d4c abdEc32e
abdEC32e2c abdEC32e4c aBdefC16b4c AcdeB16a4b ABcd16a16b2a ABc16a16b2a aBCd16b16c2b aBCde16b16c2b Acb32a AcB32a2b
AcB32a4b Acb48a AcB48a2b AcB48a4b Acb64a AcB64a2b AcB64a4b cBa2b cBa4b aBdc32b aBdC32b2c aBdC32b4c aBdc48b aBdC48b2c
aBdC48b4c aBdc64b aBdC64b2c aBdC64b4c adCb2c adCb4c AcdB32a2b AcdB32a4b Acdb48a AcdB48a2b AcdB48a4b Acdb64a AcdB64a2b
AcdB64a4b cdBa2b cdBa4b aBdeC32b2c aBdeC32b4c aBdec48b aBdeC48b2c aBdeC48b4c aBdec64b aBdeC64b2c aBdeC64b4c adeCb2c
adeCb4c Acdeb32a AcdeB32a2b AcdeB32a4b Acdeb48a AcdeB48a2b AcdeB48a4b Acdeb64a AcdeB64a2b AcdeB64a4b cdeBa2b cdeBa4b
aBdefc32b aBdefC32b2c aBdefC32b4c aBdefc48b aBdefC48b2c aBdefC48b4c aBdefc64b aBdefC64b2c aBdefC64b4c adefCb2c
adefCb4c AB16b32a4b AB16b48a4b AB16b64a4b AB16b16a2b AB16b32a2b AB16b48a2b AB16b64a2b ABc16b32a4b ABc16b48a4b
ABc16b64a4b ABc16b32a2b ABc16b48a2b ABc16b64a2b ABcd16b32a4b ABcd16b48a4b ABcd16b64a4b ABcd16b32a2b ABcd16b48a2b
ABcd16b64a2b ABcde16b32a4b ABcde16b48a4b ABcde16b64a4b ABcde16b32a2b ABcde16b48a2b ABcde16b64a2b ABc32a16b ABcd32a16b
ABcde32a16b AB48a16b AB48a32b ABc40a16b ABc40a32b aBC48b16c aBC48b32c ABcd40a16b ABcd40a32b abCd32c abdCe32c
abdCE32c2e BA16a16b2a BA16a32b2a BA16a48b2a BA16a64b2a BA16a16b4a BA16a32b4a BA16a48b4a BA16a64b4a ABcd8a2b
aBdeC16c16b2c aBdeC16c16b4c aBdefC16c16b2c AcB16b16a2b AcB16b16a4b AcdB16b16a2b AcdB16b16a4b AcdeB16b16a2b
aBdefC16c16b4c AcdeB16b16a4b AcB16b32a2b AcB16b32a4b AcB16b48a2b AcB16b48a4b AcB16b64a2b AcB16b64a4b aBdC16c16b2c
aBdC16c16b4c aBdC16c32b2c aBdC16c32b4c aBdC16c48b2c aBdC16c48b4c aBdC16c64b2c aBdC16c64b4c AcdB16b32a2b AcdB16b32a4b
AcdB16b48a2b AcdB16b48a4b AcdB16b64a2b AcdB16b64a4b aBdeC16c32b2c aBdeC16c32b4c aBdeC16c48b2c aBdeC16c48b4c
aBdeC16c64b2c aBdeC16c64b4c AcdeB16b32a2b AcdeB16b32a4b AcdeB16b48a2b AcdeB16b48a4b AcdeB16b64a2b AcdeB16b64a4b
aBdefC16c32b2c aBdefC16c32b4c aBdefC16c48b2c aBdefC16c48b4c aBdefC16c64b2c aBdefC16c64b4c decbA16a ABc4a2b ABc8a2b
aBCd8b2c ABcde4a2b ABcde8a2b ABcde40a16b ABcde40a32b aBCde8b2c ABcde4a8b8a2b ABcd4a8b8a2b ABc4a8b8a2b aBCdef4b8c8b2c
aBCde4b8c8b2c aBCd4b8c8b2c BAcde4b8a8b2a BAcd4b8a8b2a BAc4b8a8b2a aCBdef4c8b8c2b aCBde4c8b8c2b aCBd4c8b8c2b aBCdef8b2c
AB32a16b AB32a32b BA4b8a8b2a BA4b8a8b4a aBC32b16c aBC32b32c aCB4c8b8c2b aCB4c8b8c4b ABcd4a2b ABc2b8a16b4a
ABcd2b8a16b4a ABcde2b8a16b4a ABc2a8b16a4b ABc2a8b16a2b ABc2b32a8b ABcd2a8b16a4b ABcd2a8b16a2b aCBd2c8b16c2b
ABcd2b32a8b aBCd2c8b16c2b ABcde2a8b16a4b ABcde2a8b16a2b aCBde2c8b16c2b ABcde2b32a8b aBC2b8c16b2c aBCd2b8c16b2c
aBCde2b8c16b2c aBCdef2b8c16b2c BAcde2b8a16b4a BAcd2b8a16b4a BAc2b8a16b4a BAcde2b8a16b2a BAcd2b8a16b2a BAc2b8a16b2a
aBCde2c8b16c2b aBCdef2c8b16c2b aCBdef2c8b16c2b aBCd2b8c16b4c aBCde2b8c16b4c BA4b8a16b2a BA4b8a16b4a aCB4c8b16c2b
aCB4c8b16c4b BA16a16b BA16a32b BA16a48b BA16a64b aCB16c2b aCB16c4b BA16b2a BA16b4a aBC16b16c aBC16b32c AB16a16b
AB16a32b ABcde16a16b2a aBCdef16b16c2b Acedb16a aBdfec16b abdEC64e2c abdEC64e4c aCB16b16c aCB16b32c aCB16b48c aCB16b64c
aCB16b16c2b aCB16b32c2b aCB16b48c2b aCB16b64c2b aCB16b16c4b aCB16b32c4b aCB16b48c4b aCB16b64c4b abCd4c abCde4c
abCdef4c abCde32c abCdef32c ABcd16a32b decbA8a aCdefB16b32c2b aCdefB16b32c4b aCdefB16b48c2b aCdefB16b48c4b
aCdefB16b64c2b aCdefB16b64c4b BcdeA16a32b2a BcdeA16a32b4a BcdeA16a48b2a BcdeA16a48b4a BcdeA16a64b2a BcdeA16a64b4a
aCdefb32c aCdefB32c2b aCdefB32c4b aCdefb48c aCdefB48c2b aCdefB48c4b aCdefb64c aCdefB64c2b aCdefB64c4b Bcdea32b
BcdeA32b2a BcdeA32b4a Bcdea48b BcdeA48b2a BcdeA48b4a Bcdea64b BcdeA64b2a BcdeA64b4a Bca32b BcA32b2a BcA32b4a Bca48b
BcA48b2a BcA48b4a Bca64b BcA64b2a BcA64b4a aCdb32c aCdB32c2b aCdB32c4b aCdb48c aCdB48c2b aCdB48c4b aCdb64c aCdB64c2b
aCdB64c4b BcA16a16b2a BcA16a16b4a BcdA16a16b2a BcdA16a16b4a BcdeA16a16b2a BcdeA16a16b4a aCdB16b16c2b aCdB16b16c4b
aCdeB16b16c2b aCdeB16b16c4b aCdefB16b16c2b aCdefB16b16c4b BcA16a32b2a BcA16a32b4a BcA16a48b2a BcA16a48b4a BcA16a64b2a
BcA16a64b4a aCdB16b32c2b aCdB16b32c4b aCdB16b48c2b aCdB16b48c4b aCdB16b64c2b aCdB16b64c4b BcdA16a32b2a BcdA16a32b4a
BcdA16a48b2a BcdA16a48b4a BcdA16a64b2a BcdA16a64b4a aCdeB16b32c2b aCdeB16b32c4b aCdeB16b48c2b aCdeB16b48c4b
aCdeB16b64c2b aCdeB16b64c4b Bca16b BcA16b2a BcA16b4a Bcda16b BcdA16b2a BcdA16b4a Bcdea16b BcdeA16b2a BcdeA16b4a
aCdb16c aCdB16c2b aCdB16c4b aCdeb16c aCdeB16c2b aCdeB16c4b aCdefb16c aCdefB16c2b aCdefB16c4b Bcda32b BcdA32b2a
BcdA32b4a Bcda48b BcdA48b2a BcdA48b4a Bcda64b BcdA64b2a BcdA64b4a aCdeb32c aCdeB32c2b aCdeB32c4b aCdeb48c aCdeB48c2b
aCdeB48c4b aCdeb64c aCdeB64c2b aCdeB64c4b Acb24a Acdb24a Acdeb24a aBdc24b aBdec24b aBdefc24b abDc16d abdEc16e abdCe16c
AcB24a2b AcdB24a2b AcdeB24a2b aBdC24b2c aBdeC24b2c aBdefC24b2c AcB8a2b AcdB8a2b AcdeB8a2b aBdC8b2c aBdeC8b2c
aBdefC8b2c AB8b32a ABc8b32a ABcd8b32a ABcde8b32a AB8b24a ABc8b24a ABcd8b24a ABcde8b24a AB8b16a ABc8b16a ABcd8b16a
ABcde8b16a AB8b8a AB4b8a4b AB4b24a4b ABc4b8a4b ABc4b24a4b ABcd4b8a4b ABcd4b24a4b ABcde4b8a4b ABcde4b24a4b AB8b24a2b
ABc8b24a2b ABcd8b24a2b ABcde8b24a2b AB8b8a2b ABc8b8a2b ABcd8b8a2b ABcde8b8a2b AcB24a4b AcdB24a4b AcdeB24a4b aBdC24b4c
aBdeC24b4c aBdefC24b4c AcB8a4b AcdB8a4b AcdeB8a4b aBdC8b4c aBdeC8b4c aBdefC8b4c Bca8b BcA8b2a Bcda8b BcdA8b2a Bcdea8b
BcdeA8b2a aCdb8c aCdB8c2b aCdeb8c aCdeB8c2b aCdefb8c aCdefB8c2b Bca24b BcA24b2a Bcda24b BcdA24b2a Bcdea24b BcdeA24b2a
aCdb24c aCdB24c2b aCdeb24c aCdeB24c2b aCdefb24c aCdefB24c2b BcA8b4a BcdA8b4a BcdeA8b4a aCdB8c4b aCdeB8c4b aCdefB8c4b
BcA24b4a BcdA24b4a BcdeA24b4a aCdB24c4b aCdeB24c4b aCdefB24c4b AB16b48a ABc16b48a ABcd16b48a ABcde16b48a
"""

TAGS = {name: number for number, name in enumerate(_TAGS.split(), 2) if name != "-"}
"""The format tags that are written as layouts are."""
