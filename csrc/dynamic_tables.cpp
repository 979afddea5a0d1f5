// Derivation of the dynamic maps.
//
// Decade i = 0..6 holds n = 2^i (signed) or 2^(i+1) (unsigned) values: [0.1, 1] is cut into n equal parts and
// the middle of each, times 10^(i-6), is a value; the signed map has their negatives too. 0 and 1 complete
// both to 256. The cuts are made as torch.linspace makes them in fp32 with fused multiply-adds, from both
// ends towards the middle, so that the bits are those of bitsandbytes' tables on such machines; products of a
// fp32 step and a count below 2^8, and their sums, are exact in double and are rounded once.

#include "codec.h"

#include <algorithm>
#include <vector>

namespace wsd {
namespace {

std::vector<float> positive_values(int first_decade_parts) {
  std::vector<float> values;
  for (int decade = 0; decade < 7; ++decade) {
    const int parts = first_decade_parts << decade;
    const float step = (1.0f - 0.1f) / static_cast<float>(parts);
    const auto cut = [&](int k) {
      return k < (parts + 1) / 2
                 ? static_cast<float>(static_cast<double>(0.1f) + static_cast<double>(step) * k)
                 : static_cast<float>(1.0 - static_cast<double>(step) * (parts - k));
    };
    const float power = static_cast<float>(1.0 / integer_power(10.0, 6 - decade));
    for (int k = 0; k < parts; ++k) values.push_back(power * ((cut(k) + cut(k + 1)) / 2.0f));
  }
  values.push_back(1.0f);
  return values;  // strictly increasing
}

// Bits of the smallest float that is nearer to `high` than to `low`. The middle of two floats is exact in
// double; the tie itself belongs to `low`.
int32_t threshold_bits(float low, float high) {
  const double middle = (static_cast<double>(low) + static_cast<double>(high)) / 2.0;
  float candidate = static_cast<float>(middle);
  while (static_cast<double>(candidate) > middle) candidate = float_of(bits_of(candidate) - 1);
  while (static_cast<double>(candidate) <= middle) candidate = float_of(bits_of(candidate) + 1);
  return static_cast<int32_t>(bits_of(candidate));
}

void fill(NearestTable* table, const std::vector<float>& values) {
  std::vector<int32_t> thresholds;
  float low = 0.0f;
  for (const float high : values) {
    thresholds.push_back(threshold_bits(low, high));
    low = high;
  }
  table->lowest = (thresholds.front() >> 16) << 16;
  table->highest = table->lowest + (NearestTable::kBuckets << 16) - 1;
  size_t code = 0;
  for (int32_t i = 0; i < NearestTable::kBuckets; ++i) {
    const int32_t start = table->lowest + (i << 16);
    table->bucket[i] = static_cast<uint32_t>(code) << 16;
    if (code < thresholds.size() && thresholds[code] < start + (1 << 16)) {
      table->bucket[i] += static_cast<uint32_t>((1 << 16) - (thresholds[code] - start));
      ++code;
    }
  }
}

DynamicTables make_tables() {
  DynamicTables t{};
  const std::vector<float> magnitudes = positive_values(1);
  const std::vector<float> roots = positive_values(2);
  for (int k = 0; k < kMapZero; ++k) t.signed_map[kMapZero - 1 - k] = -magnitudes[static_cast<size_t>(k)];
  std::copy(magnitudes.begin(), magnitudes.end(), t.signed_map + kMapZero + 1);
  std::copy(roots.begin(), roots.end(), t.unsigned_map + 1);
  fill(&t.signed_nearest, magnitudes);
  fill(&t.unsigned_nearest, roots);
  return t;
}

}  // namespace

const DynamicTables& dynamic_tables() {
  static const DynamicTables tables = make_tables();
  return tables;
}

}  // namespace wsd
