// The text that goes with an error code, in the form CANN prints it: "CODE: sentence". The codes
// and the sentences follow the public error table of the CANN runtime (src/dfx/error_manager).
#include "internal.h"

namespace cannsim {

namespace {

struct Text {
  int code;
  const char* cann;      // the code CANN prints in front
  const char* sentence;  // %s: the function that failed
};

constexpr Text kTexts[] = {
    {107000, "EE1001", "The argument is invalid. Reason: %s received an invalid parameter."},
    {107001, "EE1003", "%s failed because the value for parameter deviceId is invalid."},
    {107002, "EE1018", "%s failed. Reason: The context is empty; call aclrtSetDevice or aclrtCreateContext in this thread first."},
    {107003, "EE1010", "%s execution failed because stream does not belong to the current context."},
    {107019, "EE1002", "Stream synchronize timeout. %s waited longer than the given time."},
    {107020, "EE1002", "Stream synchronize timeout. %s: task timeout."},
    {107022, "EE9999", "Inner Error! %s failed: the device task was aborted (FORCE STOP)."},
    {207000, "EE1005", "The current system or device does not support %s. Feature is not supported; driver and firmware packages may not match."},
    {207001, "EL0004", "Failed to allocate memory requested by APP module. %s: out of device memory."},
    {207005, "EL0006", "The resources are insufficient. %s"},
    {207006, "EL0007", "You have no permission. %s"},
    {207008, "EL0009", "The stream resources are insufficient. %s"},
    {207018, "EL0004", "Failed to allocate memory requested by APP module. %s: device OOM."},
    {507000, "EE9999", "Inner Error! %s: runtime internal error."},
    {507011, "EE1009", "Failed to execute model. Reason: %s failed."},
    {507014, "EZ9999", "Inner Error! The aicore execution times out. fault kernel_name=%s"},
    {507015, "EZ9999", "Inner Error! The error from device, there is an aicore error exception. fault kernel_name=%s"},
    {507017, "E30008", "AI CPU operator execution timed out. %s"},
    {507018, "E39999", "Inner Error! An exception occurred during AICPU execution. fault kernel_name=%s"},
    {507033, "EL0003", "The argument is invalid. Failed to start the device in %s."},
    {507034, "EZ9999", "Inner Error! The vector core execution times out. fault kernel_name=%s"},
    {507035, "EZ9999", "Inner Error! The error from device, there is an aivec error exception. fault kernel_name=%s"},
    {507046, "EE1002", "Stream synchronize timeout. %s"},
    {507047, "EE1002", "Stream synchronize timeout. %s: event synchronize timeout."},
    {507048, "EI0002", "The wait execution of the Notify register times out. Reason: The Notify register has not received the Notify record from remote rank: [unknown]. task information: [%s]."},
    {507049, "EI0012", "SDMA memory copy task exception occurred. Task information: [%s]."},
    {507053, "EZ9999", "Inner Error! %s: device MEM ERROR."},
    {507054, "EZ9999", "Inner Error! %s: hbm Multi-bit ECC error."},
    {507056, "EI0013", "An error CQE occurred during operator execution. %s: link error."},
    {507057, "EI0013", "An error CQE occurred during operator execution. %s: suspect remote error."},
    {161001, "EZ1001", "%s: a required parameter is a null pointer."},
    {161002, "EZ1001", "%s: parameter invalid (dtype, shape or format not supported)."},
};

// HcclResult
constexpr Text kHcclTexts[] = {
    {1, "EI0003", "In [%s], a value is invalid. Reason: The collective communication operator has an invalid argument."},
    {2, "EI0003", "In [%s], a pointer is null. Reason: The collective communication operator has an invalid argument."},
    {3, "EI0007", "Failed to allocate resource[memory] with info [%s]. Reason: Memory resources are exhausted."},
    {4, "EI9999", "Inner Error! %s: HCCL internal error."},
    {5, "EI0003", "In [%s], a value is not supported. Reason: The collective communication operator has an invalid argument."},
    {7, "EJ0001", "Failed to initialize the HCCP process. Reason: Maybe the last training process is running. %s"},
    {9, "EI0006", "Getting socket times out. Reason: %s"},
    {11, "EI0006", "Getting socket times out. Reason: TCP link of %s was not established."},
    {12, "EI0013", "An error CQE occurred during operator execution. %s"},
    {15, "EI9999", "Inner Error! %s: call of the runtime failed; the device may be busy."},
    {19, "EI0006", "Getting socket times out. Reason: network of %s unavailable."},
    {21, "EI0013", "An error CQE occurred during operator execution. %s"},
    {24, "EI0011", "Failed to allocate [209715200] bytes of NPU memory. %s"},
};

}  // namespace

std::string describe_error(int code, const char* where) {
  auto fill = [&](const Text& text) {
    std::string sentence = text.sentence;
    if (size_t at = sentence.find("%s"); at != std::string::npos) sentence.replace(at, 2, where);
    return std::string(text.cann) + ": " + sentence;
  };
  for (const Text& text : kTexts) {
    if (text.code == code) return fill(text);
  }
  for (const Text& text : kHcclTexts) {
    if (text.code == code) return fill(text);
  }
  return "EZ9999: Inner Error! " + std::string(where) + " failed, error code " + std::to_string(code) + ".";
}

}  // namespace cannsim
