// The dynamic-map codec (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861): m
// in a signed and v in an unsigned map of 256 strictly increasing values with an exact 0 and 1, each times
// its block's largest magnitude, each rounded to nearest; a tie goes to the value nearer to zero. The layout
// of a coded block is bitsandbytes', so that the two can be compared and such state taken over.
//
// It is not the default: an m that is not 0 beside a v that decodes to 0 blows the update up, and a v that
// falls below half of its smallest value stays there.
#pragma once

#include "moments.h"

namespace wsd {

constexpr int32_t kMapSize = 256;
constexpr int32_t kMapZero = 127;  // code of 0 in the signed map: 127 values below it, 128 above

// Nearest by one look-up. A magnitude's float bits, from `lowest` on, are cut into buckets of 2^16; no two
// thresholds share one. A bucket holds (code below its threshold << 16) + (2^16 - place of the threshold in
// it), so adding the low 16 bits carries into the code exactly from the threshold on.
struct NearestTable {
  static constexpr int32_t kBuckets = 3072;  // 24 octaves: the smallest threshold lies 22.6 below 1
  uint32_t bucket[kBuckets];
  int32_t lowest;   // bits of the first bucket
  int32_t highest;  // the last bits that are looked up
};

struct DynamicTables {
  float signed_map[kMapSize];
  float unsigned_map[kMapSize];
  NearestTable signed_nearest;  // of the magnitudes: codes 0 to 128, above kMapZero
  NearestTable unsigned_nearest;
};

struct DynamicCodec {
  static constexpr bool kRandom = false;

  WSD_FN float stored_scale(int32_t maximum_bits) { return float_of(static_cast<uint32_t>(maximum_bits)); }

  struct Decoder {
    const float* signed_map;
    const float* unsigned_map;
    float m_scale, v_scale, gain;
  };
  WSD_FN Decoder decoder(float m_scale, float v_scale, float gain, float, const CodecContext& c) {
    return Decoder{c.tables->signed_map, c.tables->unsigned_map, m_scale, v_scale, gain};
  }
  WSD_FN OldMoments decode(const Decoder& d, uint8_t m_code, uint8_t v_code) {
    return OldMoments{mul(mul(d.signed_map[m_code], d.m_scale), d.gain),
                      mul(d.unsigned_map[v_code], d.v_scale)};
  }

  WSD_FN Stored stored(const AdamElement& e) { return Stored{e.m, e.v}; }
  WSD_FN Stored stored_of(float m, float v, float) { return Stored{m, v}; }

  struct Encoder {
    const NearestTable* signed_nearest;
    const NearestTable* unsigned_nearest;
    float m_scale, v_scale;
  };
  WSD_FN Encoder encoder(float m_scale, float v_scale, const CodecContext& c) {
    return Encoder{&c.tables->signed_nearest, &c.tables->unsigned_nearest, m_scale, v_scale};
  }

  // Number of the value nearest to a magnitude, counted from 0. Beyond 1, infinities and NaN: the last one.
  WSD_FN int32_t nearest(const NearestTable& t, int32_t magnitude) {
    const int32_t capped = magnitude < t.highest ? magnitude : t.highest;
    const uint32_t place = static_cast<uint32_t>(larger(capped - t.lowest, 0));
    return static_cast<int32_t>((t.bucket[place >> 16] + (place & 0xFFFFu)) >> 16);
  }
  // Divided, not multiplied by an inverse, which overflows for the smallest scales.
  WSD_FN float relative(float x, float scale) { return div(x, scale > 0.0f ? scale : 1.0f); }

  WSD_FN uint16_t fixed_a(const Encoder& e, float m, uint32_t) {
    const int32_t count = nearest(*e.signed_nearest, magnitude_bits(relative(m, e.m_scale)));
    // The sign is that of m itself: a NaN's would be the processor's choice. The map has 1 but not -1:
    // the lowest value is the 127th below zero.
    const int32_t below = kMapZero - (count < kMapZero ? count : kMapZero);
    return static_cast<uint16_t>(static_cast<int32_t>(bits_of(m)) < 0 ? below : kMapZero + count);
  }
  WSD_FN uint8_t code_a(uint16_t fixed) { return static_cast<uint8_t>(fixed); }
  WSD_FN uint16_t fixed_b(const Encoder& e, float v, uint32_t) {
    return static_cast<uint16_t>(nearest(*e.unsigned_nearest, magnitude_bits(relative(v, e.v_scale))));
  }
  WSD_FN uint8_t code_b(uint16_t fixed) { return static_cast<uint8_t>(fixed); }
};

// The maps, derived in dynamic_tables.cpp, and their look-up tables.
const DynamicTables& dynamic_tables();

}  // namespace wsd
