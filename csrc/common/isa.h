// Hot loops are compiled once for every instruction set, from the same source (CMakeLists.txt,
// KDTREE_ISA_SOURCES), into a namespace of its own each: `isa_base` and, on x86-64, `isa_avx2`.
// Which one runs is decided at run time. All give the same bits: vectors have a fixed number of
// lanes, and sums a fixed order.
//
// Such a source includes nothing with out-of-line code that other files share, as the C++ standard
// library has: the linker could pick the copy that needs the newer processor.
#pragma once

#if !defined(KDTREE_ISA)
#define KDTREE_ISA isa_base
#endif

namespace kdtree {

bool cpu_has_avx2();

}  // namespace kdtree

#if defined(__x86_64__)
// The best build of `function` for this processor.
#define KDTREE_PICK_ISA(function) \
  (::kdtree::cpu_has_avx2() ? ::kdtree::isa_avx2::function : ::kdtree::isa_base::function)
#else
#define KDTREE_PICK_ISA(function) (::kdtree::isa_base::function)
#endif
