// What torch's autograd asks of a CUDA device, for a machine without one: a stream, and events that are always over.
// `tests/fake_gpu.py` compiles it. Tensors on this device have no memory, so nothing else is ever called.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  const Device gpu{DeviceType::CUDA, 0};
  const Stream stream{Stream::DEFAULT, gpu};

  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device exchangeDevice(Device) const override { return gpu; }
  Device getDevice() const override { return gpu; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return stream; }
  Stream getDefaultStream(Device) const override { return stream; }
  Stream exchangeStream(Stream) const noexcept override { return stream; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard);

struct FakeHooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

// Torch has made its own hooks when this library is loaded, and keeps a reference to them. They have no members, so
// the table of functions is all that has to change.
extern "C" void use_fake_hooks() {
  static FakeHooks fake;
  auto& hooks = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(&hooks) = *reinterpret_cast<void**>(&fake);
}
