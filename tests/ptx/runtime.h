// Runs a translated PTX kernel: one fiber per thread, a seeded random scheduler, and a weak memory.
//
// Stores wait in a buffer of their thread; a barrier of the CTA moves them to a buffer of the CTA, which its threads
// read; both reach memory late and in any order, but for the order of one address. A release writes those that its
// thread sees. Loads read the L1 of their CTA, sectors of 32 bytes that stay stale until an acquire. Strong loads
// (volatile, relaxed, acquire) and atomics act on memory.
#include <sys/mman.h>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <unordered_map>
#include <vector>

typedef uint8_t u8; typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64; typedef unsigned __int128 u128;
typedef int8_t s8; typedef int16_t s16; typedef int32_t s32; typedef int64_t s64; typedef __int128 s128;
typedef _Float16 f16;

// ---- values: registers are unsigned, `as` reads one as a type, `set` writes one
template <int N> using Bits = std::conditional_t<N == 2, u16, std::conditional_t<N == 4, u32, u64>>;
struct bf16 {  // rounds to nearest even
  u16 v;
  bf16() {}
  explicit bf16(float f) { u32 x; memcpy(&x, &f, 4); v = f != f ? 0x7fff : (x + 0x7fff + (x >> 16 & 1)) >> 16; }
  operator float() const { u32 x = (u32)v << 16; float f; memcpy(&f, &x, 4); return f; }
};
template <class T> constexpr bool is_float = !std::is_integral_v<T> && sizeof(T) <= 8;
static inline u16 bits16(f16 x) { u16 y; memcpy(&y, &x, 2); return y; }
static inline u16 bits16(bf16 x) { return x.v; }
template <class T, class U> static inline T as(U x) {
  if constexpr (is_float<T>) { auto bits = (Bits<sizeof(T)>)x; T y; memcpy(&y, &bits, sizeof y); return y; }
  else return (T)x;
}
template <class R, class T> static inline void set(R& r, T x) {
  if constexpr (is_float<T>) { Bits<sizeof(T)> bits; memcpy(&bits, &x, sizeof x); r = bits; } else r = (R)x;
}
template <class T> static inline T min_(T a, T b) {
  if constexpr (is_float<T>) return fmin(a, b); else return a < b ? a : b;
}
template <class T> static inline T max_(T a, T b) {
  if constexpr (is_float<T>) return fmax(a, b); else return a > b ? a : b;
}
template <class T> static inline T div_(T a, T b) {
  if constexpr (is_float<T>) return a / b; else return b == 0 ? (T)-1 : b == (T)-1 && (T)-1 < 0 ? 0 - a : a / b;
}
template <class T> static inline T rem_(T a, T b) { return b == 0 ? a : b == (T)-1 && (T)-1 < 0 ? 0 : a % b; }
template <class T> static inline T shl_(T a, u32 n) { return n >= sizeof(T) * 8 ? 0 : a << n; }
template <class T> static inline T shr_(T a, u32 n) { return n < sizeof(T) * 8 ? a >> n : a < 0 ? -1 : 0; }
static inline u32 prmt(u32 a, u32 b, u32 selector) {
  u64 bytes = (u64)b << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; i++) {
    u32 pick = selector >> 4 * i & 15, byte = bytes >> 8 * (pick & 7) & 255;
    out |= (pick & 8 ? byte & 128 ? 255 : 0 : byte) << 8 * i;
  }
  return out;
}

// ---- threads
struct Cta; struct Warp;
struct Store { u64 at; u32 size; u8 value[8]; };
struct Access { u32 written, read; int writer, reader; };  // interval between barriers, and warp, of the last ones
typedef std::vector<Store> Stores;
struct Fiber { void* sp; char* stack; int tid, place, site; Cta* cta; Warp* warp; Stores own; std::vector<u32> seen; };
struct Warp { int met = 0; u32 in[32], out[32]; std::vector<Fiber*> waiting; std::unordered_map<u64, std::vector<u64>> requests; };
struct Cta {
  int x, y, z, arrived = 0, live = 0;
  u32 interval = 1;
  std::vector<u8> shared;
  std::vector<Access> accesses;  // of each byte of shared memory
  std::unordered_map<u64, Access> stored;  // to global memory
  std::vector<Fiber*> fibers, waiting, ready;
  std::vector<Warp> warps;
  Stores stores;
  std::unordered_map<u64, std::vector<u8>> l1;
};
struct Config { u64 seed, idle; double yield, drain, stale; u64 (*sites)[3]; };  // sites: lanes, requests, sectors of each
struct Stats { u64 loads, stores, atomics, acquires, releases, barriers, stale, late; };
static Config config;
static Stats stats;
static Fiber* cur;
static void* scheduler;
static u64 state, idle;
static const char* failed;
static int grid[3], threads;
static u8** params;
static void kernel_body();

static inline u64 rnd() { state ^= state << 13; state ^= state >> 7; state ^= state << 17; return state * 0x2545F4914F6CDD1DULL; }
static inline bool chance(double p) { return p > 0 && (rnd() >> 11) * 0x1p-53 < p; }
extern "C" void swap_stacks(void** from, void* to);
asm(R"(
.text
.type swap_stacks,@function
swap_stacks:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
static __attribute__((noinline)) void yield() { Fiber* f = cur; swap_stacks(&f->sp, scheduler); }
static void fail(const char* why) { failed = why; yield(); }
static void wake(Fiber* f) { f->place = f->cta->ready.size(); f->cta->ready.push_back(f); }
static void wake(std::vector<Fiber*>& all) { for (Fiber* f : all) wake(f); all.clear(); }
static void suspend(Fiber* f) {
  auto& ready = f->cta->ready;
  ready[f->place] = ready.back(); ready[f->place]->place = f->place; ready.pop_back();
}

// ---- memory
static bool meet(const Store& s, u64 at, u32 size) { return s.at < at + size && at < s.at + s.size; }
static void write(Cta* c, const Store& s) {
  memcpy((void*)s.at, s.value, s.size);  // aligned, so within one sector
  auto line = c->l1.find(s.at >> 5);
  if (line != c->l1.end()) memcpy(&line->second[s.at & 31], s.value, s.size);
}
static void write_one(Cta* c, Stores& all, size_t k) {
  for (size_t i = 0; i < k; i++) if (meet(all[i], all[k].at, all[k].size)) return write_one(c, all, i);
  stats.late += k > 0;
  Store s = all[k];
  all.erase(all.begin() + k);
  write(c, s);
}
static void write_all(Cta* c, Stores& all) { while (!all.empty()) write_one(c, all, rnd() % all.size()); }
static void write_at(Cta* c, Stores& all, u64 at, u32 size) {
  for (size_t i = 0; i < all.size();) if (meet(all[i], at, size)) { write(c, all[i]); all.erase(all.begin() + i); } else i++;
}
static void write_at(u64 at, u32 size) { write_at(cur->cta, cur->cta->stores, at, size); write_at(cur->cta, cur->own, at, size); }
static inline void point(u64 at) {  // others may run, and stores reach memory
  if (config.sites) {
    u64 (&site)[3] = config.sites[cur->site];
    auto& sectors = cur->warp->requests[(u64)cur->site << 40 | cur->seen[cur->site]];
    site[0]++; site[1] += sectors.empty();
    for (u64 s : sectors) if (s == at >> 5) return;
    site[2]++; sectors.push_back(at >> 5);
    return;
  }
  if (chance(config.yield)) yield();
  Cta* c = cur->cta;
  if (!c->stores.empty() && chance(config.drain)) write_one(c, c->stores, rnd() % c->stores.size());
  if (!chance(config.drain)) return;
  Stores& own = c->fibers[rnd() % c->fibers.size()]->own;
  if (own.empty()) return;
  size_t k = rnd() % own.size();
  write_at(c, c->stores, own[k].at, own[k].size);  // older ones of the same address first
  write_one(c, own, k);
}
static inline void aligned(u64 at, u32 size) {
  if (at % size) { fprintf(stderr, "misaligned access of %u bytes at %lx\n", size, at); abort(); }
}
static inline void site(int id) { if (config.sites) { cur->site = id; if ((int)cur->seen.size() <= id) cur->seen.resize(id + 1); cur->seen[id]++; } }
static __attribute__((noinline)) u64 load(u64 at, u32 size) {
  stats.loads++;
  point(at);
  u64 out = 0;
  Cta* c = cur->cta;
  auto stored = c->stored.find(at);
  if (stored != c->stored.end() && stored->second.written == c->interval && stored->second.writer != cur->tid / 32)
    fail("race: a warp reads what another one has stored since the last barrier");
  auto line = c->l1.find(at >> 5);
  if (line != c->l1.end() && !chance(config.stale)) { c->l1.erase(line); line = c->l1.end(); }
  if (line == c->l1.end()) { u8* s = (u8*)(at >> 5 << 5); line = c->l1.emplace(at >> 5, std::vector<u8>(s, s + 32)).first; }
  stats.stale += memcmp(&line->second[at & 31], (void*)at, size) != 0;
  memcpy(&out, &line->second[at & 31], size);
  for (Stores* all : {&c->stores, &cur->own})
    for (auto& s : *all) if (meet(s, at, size))
      for (u32 i = 0; i < s.size; i++) if (s.at + i - at < size) ((u8*)&out)[s.at + i - at] = s.value[i];
  return out;
}
static __attribute__((noinline)) u64 load_strong(u64 at, u32 size, bool acquire) {
  stats.loads++; stats.acquires += acquire;
  point(at);
  write_at(at, size);
  u64 out = 0;
  memcpy(&out, (void*)at, size);
  if (acquire) cur->cta->l1.clear();
  return out;
}
static __attribute__((noinline)) void store(u64 at, u32 size, u64 value) {
  stats.stores++; idle = 0;
  point(at);
  Store s{at, size, {}};
  memcpy(s.value, &value, size);
  cur->own.push_back(s);
  cur->cta->stored[at] = {cur->cta->interval, 0, cur->tid / 32, 0};
}
static void release() { stats.releases++; write_all(cur->cta, cur->cta->stores); write_all(cur->cta, cur->own); }
static void acquire() { stats.acquires++; cur->cta->l1.clear(); }
template <class T, class F> static inline T atomic(u64 at, bool acquires, bool releases, F f) {
  stats.atomics++;
  aligned(at, sizeof(T)); point(at);
  if (releases) release(); else write_at(at, sizeof(T));
  T old = *(T*)at, next = f(old);
  if (memcmp(&old, &next, sizeof(T))) idle = 0;
  *(T*)at = next;
  if (acquires) acquire(); else cur->cta->l1.erase(at >> 5);
  return old;
}
static inline u8* shared(u32 at, u32 size, const u64* value) {  // checks for races between warps
  if (chance(config.yield)) yield();
  Cta* c = cur->cta;
  if ((u64)at + size > c->shared.size()) { fprintf(stderr, "shared memory has no address %x\n", at); abort(); }
  const u32 now = c->interval;
  const int warp = cur->tid / 32;
  for (u32 i = at; i < at + size; i++) {
    Access& a = c->accesses[i];
    bool changes = value && c->shared[i] != ((u8*)value)[i - at];
    if (a.written == now && a.writer != warp && (!value || changes)) fail("race: two warps, without a barrier between");
    if (changes && a.read == now && a.reader != warp) fail("race: a warp overwrites what another one has just read");
    if (changes) { a.written = now; a.writer = warp; }
    if (!value) { a.reader = a.read == now && a.reader != warp ? -1 : warp; a.read = now; }
  }
  return &c->shared[at];
}
static inline u64 load_shared(u32 at, u32 size) { u64 x = 0; memcpy(&x, shared(at, size, nullptr), size); return x; }
static inline void store_shared(u32 at, u32 size, u64 x) { memcpy(shared(at, size, &x), &x, size); }

// ---- collectives
static __attribute__((noinline)) const u32* exchange(u32 x) {  // the values of all lanes
  Warp* w = cur->warp;
  w->in[cur->tid & 31] = x;
  if (++w->met < 32) { w->waiting.push_back(cur); suspend(cur); yield(); }
  else { w->met = 0; memcpy(w->out, w->in, sizeof w->in); wake(w->waiting); }
  return cur->warp->out;
}
static u32 shfl(char mode, u32 x, u32 b, u32 c) {
  int lane = cur->tid & 31, segment = c >> 8 & 31, last = (lane & segment) | (c & 31 & ~segment), n = b & 31;
  int j = mode == 'u' ? lane - n : mode == 'd' ? lane + n : mode == 'b' ? lane ^ n : (lane & segment) | (n & ~segment);
  return exchange(x)[(mode == 'u' ? j >= last : j <= last) ? j : lane];
}
template <class F> static u32 reduce(u32 x, F f) {
  const u32* all = exchange(x);
  x = all[0];
  for (int i = 1; i < 32; i++) x = f(x, all[i]);
  return x;
}
static u32 ballot(bool x) { const u32* all = exchange(x); u32 out = 0; for (int i = 0; i < 32; i++) out |= all[i] << i; return out; }
template <class F> static inline void matrices(int n, u32 at, F f) {  // 8 rows of 16 bytes each, a lane's 4 bytes
  const u32* rows = exchange(at);
  for (int m = 0; m < n; m++) f(m, rows[m * 8 + cur->tid % 32 / 4] + cur->tid % 4 * 4);
  exchange(0);
}
static void pass(Cta* c) {
  c->arrived = 0; c->interval++; stats.barriers++;
  for (Fiber* f : c->fibers) { c->stores.insert(c->stores.end(), f->own.begin(), f->own.end()); f->own.clear(); }
  wake(c->waiting);
}
static __attribute__((noinline)) void barrier() {
  Cta* c = cur->cta;
  if (++c->arrived < c->live) { c->waiting.push_back(cur); suspend(cur); yield(); } else pass(c);
}

// ---- grids
static void entry() {
  kernel_body();
  Cta* c = cur->cta;
  idle = 0; c->live--;
  suspend(cur);
  if (c->live && c->arrived == c->live) pass(c);
  yield();
}
static char* get_stack(std::vector<char*>& free_ones, size_t size) {
  if (free_ones.empty()) return (char*)mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  char* stack = free_ones.back();
  free_ones.pop_back();
  return stack;
}
// Runs a grid, at most `resident` CTAs at a time; returns what went wrong.
extern "C" const char* run_grid(const int* size, int threads_, int shared, int resident, u8** params_, const Config* c, Stats* out) {
  const size_t STACK = 256 << 10;
  memcpy(grid, size, sizeof grid);
  config = *c; threads = threads_; params = params_; stats = {}; idle = 0; state = config.seed * 0x9E3779B97F4A7C15ULL | 1;
  std::vector<char*> stacks;
  std::vector<Cta*> live;
  failed = nullptr;
  for (int next = 0, total = grid[0] * grid[1] * grid[2]; !failed;) {
    while ((int)live.size() < resident && next < total) {
      Cta* b = new Cta;
      b->x = next % grid[0]; b->y = next / grid[0] % grid[1]; b->z = next++ / grid[0] / grid[1];
      b->live = threads; b->warps.resize(threads / 32);
      for (int i = 0; i < shared + 16; i++) b->shared.push_back(rnd());
      b->accesses.resize(b->shared.size());
      for (int t = 0; t < threads; t++) {
        Fiber* f = new Fiber{nullptr, get_stack(stacks, STACK), t, 0, 0, b, &b->warps[t / 32], {}, {}};
        void** sp = (void**)(f->stack + STACK - 64);
        *--sp = nullptr; *--sp = (void*)entry;
        f->sp = sp - 6;  // of the registers that swap_stacks restores
        b->fibers.push_back(f);
        wake(f);
      }
      live.push_back(b);
    }
    if (live.empty()) break;
    size_t k = rnd() % live.size();
    Cta* b = live[k];
    if (!b->live) {
      for (Fiber* f : b->fibers) { write_all(b, b->stores); write_all(b, f->own); stacks.push_back(f->stack); delete f; }
      delete b; live[k] = live.back(); live.pop_back();
      continue;
    }
    for (int burst = rnd() % 64; burst >= 0 && !b->ready.empty() && !failed; burst--) {  // some CTAs run ahead of others
      cur = b->ready[rnd() % b->ready.size()];
      swap_stacks(&scheduler, cur->sp);
    }
    if (failed) break;
    bool stuck = true;
    for (Cta* o : live) stuck &= o->live && o->ready.empty();
    if (stuck) failed = "deadlock: every thread waits at a barrier";
    else if (++idle > config.idle) failed = "no end: threads spin, and no memory changes";
  }
  for (char* s : stacks) munmap(s, STACK);
  *out = stats;
  return failed;
}
