// The cube core: LoadData from L1 into L0A and L0B, Mmad into L0C, Fixpipe from L0C to global memory.
#ifndef TWIN_CUBE_H
#define TWIN_CUBE_H
#include <vector>

#include "twin/copy.h"

namespace AscendC {
namespace twin {
constexpr int64_t FRACTAL_BYTES = 512;

inline void CheckFractalShape(Instr& in, const char* name, int64_t value)
{
    in.Range(name, value, 1, 4095);
    if (value % 16 != 0) {
        in.Fail("fractal", "%s is %lld: the cube works on whole 16x16 fractals, round up to 16 and fill with zeros", name,
            static_cast<long long>(value));
    }
}

// Every fractal must hold the part of its NZ matrix that its place in L0 stands for; a wrong srcStride, dstGap or
// offset of LoadData shows here. Fractals loaded from different L1 buffers are not compared.
inline void CheckLayout(Instr& in, const LocalRef& ref, int64_t rows, int64_t columns, bool left)
{
    const FractalTag first = GetFractal(ref, 0);
    if (first.source < 0) {
        return;
    }
    // A (left) is row-major Zz as stored; B lies transposed inside its fractals, so a plain NZ matrix is loaded with
    // ifTranspose.
    const bool straight = left ? !first.transposed : first.transposed;
    for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; ++j) {
            const FractalTag tag = GetFractal(ref, (i * columns + j) * FRACTAL_BYTES);
            if (tag.source < 0 || tag.matrix != first.matrix || tag.column != first.column) {
                continue;
            }
            const int64_t expected = first.source +
                (straight ? i * FRACTAL_BYTES + j * first.column : j * FRACTAL_BYTES + i * first.column);
            if (tag.transposed != first.transposed) {
                in.Fail("fractal", "fractal (%lld, %lld) of %s was loaded with another ifTranspose than fractal (0, 0)",
                    static_cast<long long>(i), static_cast<long long>(j), NameOf(ref.hardware));
            }
            if (tag.source != expected) {
                in.Fail("fractal", "fractal (%lld, %lld) of %s was loaded from L1 byte %lld, but its place in the matrix is "
                    "at byte %lld: srcStride, dstGap or an offset of LoadData is wrong", static_cast<long long>(i),
                    static_cast<long long>(j), NameOf(ref.hardware), static_cast<long long>(tag.source),
                    static_cast<long long>(expected));
            }
        }
    }
}

inline void CheckMemory(Instr& in, const LocalRef& ref, Hardware expected, const char* what)
{
    if (ref.hardware != expected) {
        in.Fail("data path", "%s must be in %s, it is in %s", what, NameOf(expected), NameOf(ref.hardware));
    }
}

inline bool HasNan(const std::vector<float>& values)
{
    for (const float v : values) {
        if (v != v) return true;
    }
    return false;
}

// fp16 or fp32 fractals to float: `transposed` turns the inside of each fractal.
template <typename T>
inline void Unpack(const uint8_t* bytes, int64_t fractalRows, int64_t fractalColumns, bool transposed,
    std::vector<float>& out)
{
    const T* data = reinterpret_cast<const T*>(bytes);
    const int64_t columns = fractalColumns * 16;
    out.resize(static_cast<size_t>(fractalRows * 16 * columns));
    for (int64_t i = 0; i < fractalRows; ++i) {
        for (int64_t j = 0; j < fractalColumns; ++j) {
            const T* fractal = data + (i * fractalColumns + j) * 256;
            for (int64_t r = 0; r < 16; ++r) {
                float* row = out.data() + (i * 16 + r) * columns + j * 16;
                for (int64_t c = 0; c < 16; ++c) {
                    row[c] = static_cast<float>(transposed ? fractal[c * 16 + r] : fractal[r * 16 + c]);
                }
            }
        }
    }
}
} // namespace twin

template <typename T>
inline void LoadData(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LoadData2DParams& p,
    twin::Loc loc = twin::Loc::Here())
{
    static_assert(sizeof(T) == 2, "the twin models LoadData of 16-bit elements");
    twin::Instr in(PIPE_MTE1, "LoadData", loc);
    if (dst.ref().hardware != Hardware::L0A && dst.ref().hardware != Hardware::L0B) {
        in.Fail("data path", "LoadData goes from L1 to L0A or L0B, not to %s", twin::NameOf(dst.ref().hardware));
    }
    twin::CheckMemory(in, src.ref(), Hardware::L1, "the source of LoadData");
    in.Range("repeatTimes", p.repeatTimes, 1, 255);
    in.Range("startIndex", p.startIndex, 0, 65535);
    in.Range("srcStride", p.srcStride, 0, 65535);
    in.Range("dstGap", p.dstGap, 0, 65535);
    for (int64_t r = 0; r < p.repeatTimes; ++r) {
        const int64_t from = (p.startIndex + r * p.srcStride) * twin::FRACTAL_BYTES;
        const int64_t to = r * (1 + p.dstGap) * twin::FRACTAL_BYTES;
        const T* source = reinterpret_cast<const T*>(in.Read(src.ref(), from, twin::FRACTAL_BYTES));
        T* target = reinterpret_cast<T*>(in.Write(dst.ref(), to, twin::FRACTAL_BYTES, 512));
        for (int64_t i = 0; i < 16; ++i) {
            for (int64_t j = 0; j < 16; ++j) {
                target[i * 16 + j] = p.ifTranspose ? source[j * 16 + i] : source[i * 16 + j];
            }
        }
        twin::FractalTag tag = twin::TagOf(src.ref(), from);
        tag.transposed = p.ifTranspose;
        twin::SetFractal(dst.ref(), to, tag);
    }
    in.work.kind = twin::Kind::LoadData;
    in.work.fractals = p.repeatTimes;
    in.work[dst.ref().hardware == Hardware::L0A ? twin::Path::L1_TO_L0A : twin::Path::L1_TO_L0B] +=
        p.repeatTimes * twin::FRACTAL_BYTES;
}

// C[m, n] (+)= A[m, k] x B[k, n]; A is Zz in L0A, B is Zn in L0B, C is NZ in L0C, sums are fp32.
template <typename D, typename A, typename B>
inline void Mmad(const LocalTensor<D>& dst, const LocalTensor<A>& fm, const LocalTensor<B>& filter,
    const MmadParams& p, twin::Loc loc = twin::Loc::Here())
{
    static_assert(std::is_same<D, float>::value && std::is_same<A, half>::value && std::is_same<B, half>::value,
        "the twin models Mmad of fp16 into fp32");
    twin::Instr in(PIPE_M, "Mmad", loc);
    twin::CheckMemory(in, dst.ref(), Hardware::L0C, "the result of Mmad");
    twin::CheckMemory(in, fm.ref(), Hardware::L0A, "the left matrix of Mmad");
    twin::CheckMemory(in, filter.ref(), Hardware::L0B, "the right matrix of Mmad");
    if (p.m == 1) {
        in.Fail("m == 1", "m is 1: the unit switches to GEMV and reads A as a plain row, not as fractals; pad m to 16");
    }
    twin::CheckFractalShape(in, "m", p.m);
    twin::CheckFractalShape(in, "n", p.n);
    twin::CheckFractalShape(in, "k", p.k);
    if (p.unitFlag != 0 || p.cmatrixSource || p.isBias || p.enSsparse || p.fmOffset != 0) {
        in.Fail("not modelled", "unitFlag, bias buffers, sparsity and fmOffset of Mmad are not modelled by the twin");
    }
    const int64_t mf = p.m / 16, nf = p.n / 16, kf = p.k / 16, bytes = p.m * p.n * 4;
    const bool accumulate = !p.cmatrixInitVal;
    if (accumulate && mf * nf < 10 && twin::PendingMmad(dst.ref(), bytes)) {
        in.Fail("accumulation", "%lld result fractals are fewer than 10: PipeBarrier<PIPE_M> is needed between two Mmad that "
            "add to the same L0C tile", static_cast<long long>(mf * nf));
    }
    static thread_local std::vector<float> a, b;
    twin::Unpack<A>(in.Read(fm.ref(), 0, p.m * p.k * 2, 512), mf, kf, false, a);
    twin::Unpack<B>(in.Read(filter.ref(), 0, p.k * p.n * 2, 512), kf, nf, true, b);
    twin::CheckLayout(in, fm.ref(), mf, kf, true);
    twin::CheckLayout(in, filter.ref(), kf, nf, false);
    if (!twin::MmadNanAllowed() && (twin::HasNan(a) || twin::HasNan(b))) {
        in.Fail("NaN input", "an operand of Mmad holds NaN, which can raise an execution error on the chip");
    }
    if (accumulate) {
        in.Read(dst.ref(), 0, bytes, 1024);
    }
    float* c = reinterpret_cast<float*>(in.Write(dst.ref(), 0, bytes, 1024));
    twin::TagNz(dst.ref(), 0, bytes, p.m * 64);
    const int64_t m = p.m, n = p.n, k = p.k;
    static thread_local std::vector<float> row;
    row.resize(static_cast<size_t>(n));
    for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) row[j] = accumulate ? c[(j / 16 * m + i) * 16 + j % 16] : 0.0f;
        for (int64_t q = 0; q < k; ++q) {
            const float left = a[i * k + q];
            const float* right = b.data() + q * n;
            float* sum = row.data();
            for (int64_t j = 0; j < n; ++j) sum[j] += left * right[j];
        }
        for (int64_t j = 0; j < n; ++j) c[(j / 16 * m + i) * 16 + j % 16] = row[j];
    }
    in.work.kind = twin::Kind::Mmad;
    in.work.fractals = mf * nf * kf;
}

// L0C (NZ, fp32) to global memory as rows.
template <typename D, typename S, const FixpipeConfig& config = CFG_ROW_MAJOR>
inline void Fixpipe(const GlobalTensor<D>& dst, const LocalTensor<S>& src, const FixpipeParamsV220& p,
    twin::Loc loc = twin::Loc::Here())
{
    static_assert(std::is_same<S, float>::value, "the twin models Fixpipe from fp32");
    static_assert(config.format == CO2Layout::ROW_MAJOR, "the twin models Fixpipe to rows (CFG_ROW_MAJOR)");
    constexpr bool toHalf = std::is_same<D, half>::value;
    static_assert(toHalf || std::is_same<D, float>::value, "the twin models Fixpipe to half and float");
    twin::Instr in(PIPE_FIX, "Fixpipe", loc);
    twin::CheckMemory(in, src.ref(), Hardware::L0C, "the source of Fixpipe");
    if ((p.quantPre == QuantMode_t::F322F16) != toHalf || (!toHalf && p.quantPre != QuantMode_t::NoQuant)) {
        in.Fail("quant mode", "%s", toHalf ? "fp32 to fp16 needs quantPre = F322F16" : "fp32 to fp32 needs quantPre = NoQuant");
    }
    in.Range("nSize", p.nSize, 1, 4095);
    in.Range("mSize", p.mSize, 1, 8192);
    in.Range("srcStride", p.srcStride, 1, 65535);
    in.Range("dstStride", p.dstStride, 1, twin::U32::Limit());
    in.Range("ndNum", p.ndNum, 1, 65535);
    if (p.nSize % 16 != 0) {
        in.Fail("fractal", "nSize is %lld: it must be a multiple of 16", static_cast<long long>(p.nSize));
    }
    if (p.srcStride % 16 != 0 || p.srcStride < p.mSize) {
        in.Fail("fractal", "srcStride is %lld: it is the number of rows in L0C, a multiple of 16 and at least mSize = %lld",
            static_cast<long long>(p.srcStride), static_cast<long long>(p.mSize));
    }
    if (p.mSize > 1 && p.dstStride < p.nSize) {
        in.Fail("parameter range", "dstStride is %lld, less than nSize = %lld: rows of the result would lie over each other",
            static_cast<long long>(p.dstStride), static_cast<long long>(p.nSize));
    }
    if (p.unitFlag != 0) {
        in.Fail("not modelled", "unitFlag of Fixpipe is not modelled by the twin");
    }
    twin::CheckAtomicType<D>(in);
    static thread_local std::vector<D> row;
    row.resize(static_cast<size_t>(p.nSize));
    for (int64_t nd = 0; nd < p.ndNum; ++nd) {
        const int64_t base = nd * p.srcNdStride * 1024; // srcNdStride counts fp32 fractals
        const uint8_t* data = twin::LocalData(src.ref());
        in.Read(src.ref(), base, 0, 64);
        for (int64_t column = 0; column < p.nSize / 16; ++column) {
            // Of a few rows of a taller matrix the stride is still the matrix's: another one reads other columns.
            const int64_t at = base + column * p.srcStride * 64;
            in.Read(src.ref(), at, p.mSize * 64, 64);
            for (int64_t r = 0; r < p.mSize; ++r) {
                const int64_t rows = twin::TagOf(src.ref(), at + r * 64).column / 64;
                if (rows != 0 && rows != p.srcStride) {
                    in.Fail("fractal", "srcStride is %lld, but Mmad wrote L0C with %lld rows",
                        static_cast<long long>(p.srcStride), static_cast<long long>(rows));
                }
            }
        }
        for (int64_t r = 0; r < p.mSize; ++r) {
            for (int64_t c = 0; c < p.nSize; ++c) {
                float value;
                std::memcpy(&value, data + base + ((c / 16 * p.srcStride + r) * 16 + c % 16) * 4, 4);
                if (p.reluEn && value < 0) value = 0;
                row[c] = static_cast<D>(value);
            }
            twin::Store<D>(in, dst.ref(), (nd * p.dstNdStride + r * p.dstStride) * int64_t(sizeof(D)),
                reinterpret_cast<const uint8_t*>(row.data()), p.nSize * int64_t(sizeof(D)));
        }
    }
    in.work.kind = twin::Kind::Fixpipe;
    in.work.bursts = p.ndNum * p.mSize;
    in.work[twin::Path::L0C_TO_GM] += p.ndNum * p.mSize * p.nSize * int64_t(sizeof(D));
}
} // namespace AscendC
#endif
