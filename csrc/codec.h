// What every codec of Adam's moments has to say, and the list of them.
//
// A codec keeps two bytes a parameter and two fp32 scales a block. It is a struct with
//   Decoder, decoder()            what decoding a block needs, from its scales
//   decode()                      the two bytes back to beta1 m and v
//   stored(), stored_of()         the two numbers it keeps of an element, from a step or from m and v
//   stored_scale()                the scale of a block, from the bits of the largest of such numbers
//   Encoder, encoder()            what encoding a block needs, from its new scales
//   fixed_a(), fixed_b()          a number, with 32 random bits, as 16 bits: wide vectors end here
//   code_a(), code_b()            that as a byte: narrow vectors begin here
//   kRandom                       whether it uses the random bits
// To add one: write the struct and name it in WSD_CODECS; the kernels of every instruction set follow.
#pragma once

#include "dynamic_codec.h"
#include "ratio_codec.h"

// A codec's number is its place in this list.
#define WSD_CODECS(use) use(RatioCodec) use(DynamicCodec)

namespace wsd {

#define WSD_ONE(Codec) +1
constexpr int kCodecs = 0 WSD_CODECS(WSD_ONE);
#undef WSD_ONE

}  // namespace wsd
