// Each collective as a launch: which kernel, how many blocks, which arguments.
#include <algorithm>

#include "kernels/cuda/device_comm.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {
namespace {

// All packet calls of a communicator use equally many blocks (packet.h).
constexpr unsigned kPacketChannels = 4;

uint64_t sum_bytes(const std::vector<Span>& spans) {
  uint64_t total = 0;
  for (const Span& s : spans) total += s.bytes;
  return total;
}

}  // namespace

void DeviceComm::all_reduce(char* in, char* out, uint64_t elems, const Reduction& r) {
  const uint64_t bytes = elems * uint64_t(size_of(r.dtype));
  const Algorithm algorithm = chosen(r.algorithm, bytes, size_of(r.dtype) <= 8);
  Prepared p{nullptr,
             channels_for(bytes),
             args_of(Collective::kAllReduce, algorithm, r.dtype, bytes, -1),
             {},
             {}};
  const bool packet = algorithm == Algorithm::kPacket;
  if (packet) p.channels = std::min(kPacketChannels, unsigned(config_.layout.channels));
  p.function = reduction_kernel(packet ? "packet" : "all_reduce", r);
  p.args.in = in;
  p.args.out = out;
  p.args.total_bytes = bytes;
  p.args.chunk_bytes = balanced_chunk_bytes(bytes, config_.world);
  p.args.redop = int32_t(r.op);
  p.args.factor = r.factor;
  check_pieces(p.args.chunk_bytes, p.channels);
  submit(std::move(p));
}

void DeviceComm::reduce(char* in, char* out, uint64_t elems, const Reduction& r, int root) {
  const uint64_t bytes = elems * uint64_t(size_of(r.dtype));
  Prepared p{reduction_kernel("reduce_scatter", r),
             channels_for(bytes),
             args_of(Collective::kReduce, Algorithm::kDirect, r.dtype, bytes, root),
             {},
             {}};
  p.in.assign(size_t(config_.world), Span{in, 0});
  p.in[size_t(root)].bytes = bytes;
  p.args.out = out;
  p.args.redop = int32_t(r.op);
  p.args.factor = r.factor;
  check_pieces(bytes, p.channels);
  submit(std::move(p));
}

void DeviceComm::reduce_scatter(char* in, char* out, uint64_t out_elems, const Reduction& r) {
  const uint64_t chunk = out_elems * uint64_t(size_of(r.dtype)),
                 total = chunk * uint64_t(config_.world);
  const Algorithm algorithm = chosen(r.algorithm, chunk, size_of(r.dtype) <= 8);
  const bool packet = algorithm == Algorithm::kPacket;
  Prepared p{reduction_kernel(packet ? "packet" : "reduce_scatter", r),
             channels_for(chunk),
             args_of(Collective::kReduceScatter, algorithm, r.dtype, total, -1),
             {},
             {}};
  if (packet) p.channels = std::min(kPacketChannels, unsigned(config_.layout.channels));
  p.args.in = in;
  p.args.out = out;
  p.args.total_bytes = total;
  p.args.chunk_bytes = chunk;
  p.args.redop = int32_t(r.op);
  p.args.factor = r.factor;
  check_pieces(chunk, p.channels);
  submit(std::move(p));
}

void DeviceComm::reduce_scatter_list(const std::vector<Span>& in, char* out, const Reduction& r) {
  const uint64_t total = sum_bytes(in);
  Prepared p{reduction_kernel("reduce_scatter", r),
             channels_for(total / uint64_t(config_.world)),
             args_of(Collective::kReduceScatter, Algorithm::kDirect, r.dtype, total, -1),
             in,
             {}};
  p.args.out = out;
  p.args.redop = int32_t(r.op);
  p.args.factor = r.factor;
  check_pieces(total, p.channels);
  submit(std::move(p));
}

void DeviceComm::all_gather(char* in, char* out, uint64_t in_bytes, DType dtype,
                            Algorithm algorithm) {
  if (algorithm == Algorithm::kCopy) return copy_all_gather(in, out, in_bytes, dtype);
  const uint64_t total = in_bytes * uint64_t(config_.world);
  const Algorithm how = chosen(algorithm, in_bytes, true);
  const bool packet = how == Algorithm::kPacket;
  Prepared p{kernel("move", packet ? "rc_packet_move" : "rc_move"),
             channels_for(in_bytes),
             args_of(Collective::kAllGather, how, dtype, total, -1),
             {},
             {}};
  if (packet) p.channels = std::min(kPacketChannels, unsigned(config_.layout.channels));
  p.args.in = in;
  p.args.out = out;
  p.args.total_bytes = total;
  p.args.chunk_bytes = in_bytes;
  check_pieces(in_bytes, p.channels);
  submit(std::move(p));
}

void DeviceComm::copy_all_gather(char* in, char* out, uint64_t in_bytes, DType dtype) {
  const auto device = [](const void* ptr) { return reinterpret_cast<uint64_t>(ptr); };
  const uint64_t staging = config_.layout.copy_bytes, total = in_bytes * uint64_t(config_.world);
  if (staging == 0)
    throw std::invalid_argument("algorithm: \"copy\" needs CommOptions.copy_bytes > 0");
  const auto at_copy = [&](int p) { return regions_[size_t(p)] + config_.layout.copy_offset(); };
  const auto meet = [&](bool continues) {
    submit({kernel("move", "rc_move"),
            1,
            args_of(Collective::kAllGather, Algorithm::kCopy, dtype, total, -1),
            {},
            {},
            continues});
  };
  if (in != out + uint64_t(config_.rank) * in_bytes)
    submit_copy(device(out) + uint64_t(config_.rank) * in_bytes, device(in), in_bytes);
  for (uint64_t begin = 0; begin == 0 || begin < in_bytes; begin += staging) {
    const uint64_t bytes = std::min(staging, in_bytes - begin);
    submit_copy(at_copy(config_.rank), device(in) + begin, bytes);
    meet(begin > 0);  // every rank's piece is staged
    for (int d = 1; d < config_.world; ++d) {
      const int p = rotated_peer(config_.rank, d, config_.world);
      submit_copy(device(out) + uint64_t(p) * in_bytes + begin, at_copy(p), bytes);
    }
    meet(true);  // every rank has fetched it: staging is free again
  }
}

void DeviceComm::all_gather_list(char* in, const std::vector<Span>& out, DType dtype) {
  const uint64_t total = sum_bytes(out);
  Prepared p{kernel("move", "rc_move"),
             channels_for(total / uint64_t(config_.world)),
             args_of(Collective::kAllGather, Algorithm::kDirect, dtype, total, -1),
             {},
             out};
  p.args.in = in;
  check_pieces(total, p.channels);
  submit(std::move(p));
}

void DeviceComm::broadcast(char* buffer, uint64_t bytes, DType dtype, int root) {
  Prepared p{kernel("move", "rc_move"),
             channels_for(bytes),
             args_of(Collective::kBroadcast, Algorithm::kDirect, dtype, bytes, root),
             {},
             {}};
  p.out.assign(size_t(config_.world), Span{buffer, bytes});
  check_pieces(bytes, p.channels);
  submit(std::move(p));
}

void DeviceComm::gather(char* in, uint64_t bytes, const std::vector<Span>& out, DType dtype,
                        int root) {
  Prepared p{kernel("move", "rc_move"),
             channels_for(bytes),
             args_of(Collective::kGather, Algorithm::kDirect, dtype, bytes, root),
             {},
             out};
  p.in.assign(size_t(config_.world), Span{in, bytes});
  check_pieces(bytes, p.channels);
  submit(std::move(p));
}

void DeviceComm::scatter(const std::vector<Span>& in, char* out, uint64_t bytes, DType dtype,
                         int root) {
  Prepared p{kernel("move", "rc_move"),
             channels_for(bytes),
             args_of(Collective::kScatter, Algorithm::kDirect, dtype, bytes, root),
             in,
             {}};
  p.out.assign(size_t(config_.world), Span{out, bytes});
  check_pieces(bytes, p.channels);
  submit(std::move(p));
}

void DeviceComm::all_to_all(const std::vector<Span>& in, const std::vector<Span>& out,
                            DType dtype) {
  // Every pair has its own size, so no size tells all ranks how many channels to use: all of them.
  Prepared p{kernel("move", "rc_move"), unsigned(config_.layout.channels),
             args_of(Collective::kAllToAll, Algorithm::kDirect, dtype, 0, -1), in, out};
  check_pieces(sum_bytes(in) + sum_bytes(out), p.channels);
  submit(std::move(p));
}

void DeviceComm::barrier() {
  submit({kernel("move", "rc_move"),
          1,
          args_of(Collective::kBarrier, Algorithm::kDirect, DType::kUInt8, 0, -1),
          {},
          {}});
}

void DeviceComm::messages(const std::vector<Span>& send, uint64_t readers,
                          const std::vector<Span>& receive, uint64_t senders, int tag) {
  Prepared p{kernel("move", "rc_move"), unsigned(config_.message_channels),
             args_of(Collective::kSend, Algorithm::kDirect, DType::kUInt8, 0, tag), send, receive};
  p.args.my_readers = readers;
  p.args.my_senders = senders;
  check_pieces(sum_bytes(send) + sum_bytes(receive), p.channels);
  submit(std::move(p));
}

}  // namespace device
RINGCOMM_NAMESPACE_END
