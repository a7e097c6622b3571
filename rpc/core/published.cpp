#include "rpc/core/published.h"

#include <cstring>
#include <utility>

#include "channels/region.h"

namespace tensorferry {

Result<std::shared_ptr<const Published>> Published::make(const Message& message) {
  auto published = std::make_shared<Published>();
  std::size_t end = 0;
  for (std::size_t i = 0; i < message.buffers.size(); ++i) {
    const auto& buffer = message.buffers[i];
    if (buffer.device.type != DeviceType::cpu || message.destination_of(i).device.type != DeviceType::cpu) {
      return Status(Code::invalid_argument, "cannot publish a tensor on " + text_of(buffer.device) +
                                                ": only host memory can be mapped by many; publish tensor.cpu()");
    }
    if (message.sharing_of(i) != Sharing::by_value) {
      return Status(Code::invalid_argument, "cannot publish memory that is handed over already (tensorferry.share)");
    }
    end = (end + PublishedPart::alignment - 1) / PublishedPart::alignment * PublishedPart::alignment;
    published->parts_.push_back({end, buffer.bytes});
    end += buffer.bytes;
  }
  published->payload_ = message.payload;
  if (end != 0) {
    auto region = Regions::of_this_process().make_frozen(end, [&](std::byte* to) {
      for (std::size_t i = 0; i < message.buffers.size(); ++i) {
        const auto& buffer = message.buffers[i];
        if (buffer.bytes != 0) std::memcpy(to + published->parts_[i].offset, buffer.data, buffer.bytes);
      }
    });
    if (!region.ok()) return region.status();
    published->region_ = *std::move(region);
  }
  return std::shared_ptr<const Published>(std::move(published));
}

void Published::write(Encoder& out, const void* identity) const { out.published(payload_, parts_, region_, identity); }

std::vector<Buffer> published_buffers(const Decoder& in) {
  std::vector<Buffer> buffers;
  buffers.reserve(in.parts().size());
  for (const auto& part : in.parts()) {
    const auto& whole = in.buffers()[in.buffer()];
    buffers.push_back(
        {whole.device, whole.data + part.offset, static_cast<std::size_t>(part.bytes), nullptr, whole.owner});
  }
  return buffers;
}

}  // namespace tensorferry
