// Packs digits of 8 or 16 bits into adjacent fields of a few bits, and unpacks them.
#pragma once

#include "block.h"

namespace hvd_compress {

// Loading a word relies on the byte order.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

HVD_BODY uint64_t low_bits(int count) {
  return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
}

HVD_BODY uint64_t load_word(const void* memory) {
  uint64_t word;
  memcpy(&word, memory, sizeof(word));
  return word;
}

// Packs the digits of a word into fields of `bits` bits. The digits must be below 2**bits. The
// third argument gives the type of a digit; a digit of 64 bits is a field already.
HVD_BODY uint64_t fold(uint64_t word, int bits, uint16_t) {
  constexpr uint64_t kPairs = 0x0000FFFF0000FFFF, kHalf = 0xFFFFFFFF;
  word = (word & kPairs) | ((word >> 16) & kPairs) << bits;
  return (word & kHalf) | (word >> 32) << (2 * bits);
}

HVD_BODY uint64_t fold(uint64_t word, int bits, uint8_t) {
  constexpr uint64_t kPairs = 0x00FF00FF00FF00FF;
  word = (word & kPairs) | ((word >> 8) & kPairs) << bits;
  return fold(word, 2 * bits, uint16_t());
}

HVD_BODY uint64_t fold(uint64_t word, int, uint64_t) { return word; }

// The inverse. The bits above the last field must be 0.
HVD_BODY uint64_t unfold(uint64_t word, int bits, uint32_t) {
  return (word & low_bits(bits)) | (word >> bits) << 32;
}

HVD_BODY uint64_t unfold(uint64_t word, int bits, uint16_t) {
  uint64_t fields = low_bits(bits) * 0x0000000100000001;
  word = unfold(word, 2 * bits, uint32_t());
  return (word & fields) | ((word >> bits) & fields) << 16;
}

HVD_BODY uint64_t unfold(uint64_t word, int bits, uint8_t) {
  uint64_t fields = low_bits(bits) * 0x0001000100010001;
  word = unfold(word, 2 * bits, uint16_t());
  return (word & fields) | ((word >> bits) & fields) << 8;
}

// Eight codes: 8 * bits bits.
struct Unit {
  uint64_t low;
  uint64_t high;
};

// Joins two numbers of 4 * bits bits, bits <= 16. Shifts in two steps: a shift by 64 is undefined.
HVD_BODY Unit join(uint64_t first, uint64_t second, int bits) {
  return {first | (second << (4 * bits - 1)) << 1, second >> (64 - 4 * bits)};
}

HVD_BODY Unit pack_unit(const uint8_t* digits, int bits) {
  return {fold(load_word(digits), bits, uint8_t()), 0};
}

HVD_BODY Unit pack_unit(const uint16_t* digits, int bits) {
  return join(fold(load_word(digits), bits, uint16_t()),
              fold(load_word(digits + 4), bits, uint16_t()), bits);
}

// The bits above the unit in its words are ignored.
HVD_BODY void unpack_unit(Unit unit, int bits, uint8_t* digits) {
  uint64_t word = unfold(unit.low & low_bits(8 * bits), bits, uint8_t());
  memcpy(digits, &word, sizeof(word));
}

HVD_BODY void unpack_unit(Unit unit, int bits, uint16_t* digits) {
  uint64_t mask = low_bits(4 * bits);
  uint64_t second = (unit.low >> (4 * bits - 1)) >> 1 | unit.high << (64 - 4 * bits);
  uint64_t words[2] = {unfold(unit.low & mask, bits, uint16_t()),
                       unfold(second & mask, bits, uint16_t())};
  memcpy(digits, words, sizeof(words));
}

}  // namespace hvd_compress
