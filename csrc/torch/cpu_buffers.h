// Recycled host memory on huge pages, for gradients and scratch of the CPU operators.
//
// A fresh buffer of some megabytes costs its page faults: 2-4 times the work itself in torch's sparse backward. Buffers
// of at least kRecycledBytes are kept when freed and handed out again; smaller ones go to malloc, which keeps them.
#pragma once

#include <cstdint>

namespace fastemb {

void* acquire_buffer(int64_t bytes);                // 64-byte aligned, contents unspecified
void release_buffer(void* buffer);                  // null is fine
int64_t cached_buffer_bytes();                      // kept, not in use
void release_cached_buffers();                      // back to the system
void advise_huge_pages(void* data, int64_t bytes);  // where whole ones fit in

}  // namespace fastemb
