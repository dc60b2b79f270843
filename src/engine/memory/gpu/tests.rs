//! GPU only (`TRAINER_TEST_DEVICE=cuda`): tensors come from the heap, keep their values across compaction, and fail to
//! allocate at its capacity.

use candle_core::{DType, Device, Tensor};

use super::GpuDevice;
use crate::kernels::cuda::{from_host, is_out_of_memory, uninit};
use crate::layers::gradcheck;

const MIB: u64 = 1 << 20;

fn open_gpu(limit: u64) -> Option<GpuDevice> {
    let Device::Cuda(_) = gradcheck::test_device() else {
        eprintln!("skipped: no GPU requested");
        return None;
    };
    Some(GpuDevice::open(0, |_| limit).unwrap())
}

fn filled(gpu: &GpuDevice, value: f32, mib: u64) -> candle_core::Result<Tensor> {
    let Device::Cuda(device) = &gpu.device else { candle_core::bail!("no GPU") };
    let len = (mib * MIB / 4) as usize;
    let tensor = uninit(device, DType::F32, len)?;
    from_host(&tensor, &vec![value; len])?;
    Ok(tensor)
}

fn all_are(tensor: &Tensor, value: f32) -> bool {
    let (low, high) = (tensor.min(0).unwrap(), tensor.max(0).unwrap());
    [low, high].iter().all(|x| x.to_dtype(DType::F32).unwrap().to_scalar::<f32>().unwrap() == value)
}

#[test]
fn every_tensor_comes_from_the_heap() {
    let Some(gpu) = open_gpu(256 * MIB) else { return };
    let x = filled(&gpu, 2.0, 32).unwrap();
    assert!((32 * MIB..33 * MIB).contains(&gpu.heap().used_bytes()));
    let y = x.affine(3.0, 1.0).unwrap();
    assert!((64 * MIB..65 * MIB).contains(&gpu.heap().used_bytes()), "candle's own operations too");
    assert!(all_are(&y, 7.0));
    drop((x, y));
    assert_eq!(gpu.heap().used_bytes(), 0);
    assert!(gpu.take_recent_peak() >= 64 * MIB);
}

/// The capacity is 96 MiB above the limit, in chunks of 2 MiB. Tensors of 20 MiB fill it and every other one is freed;
/// a tensor longer than any hole still fits, after one synchronize, and no live tensor has moved.
#[test]
fn memory_that_is_moved_keeps_what_is_in_use() {
    let Some(gpu) = open_gpu(104 * MIB) else { return };
    let tensors: Vec<Tensor> = (0..10).map(|i| filled(&gpu, i as f32, 20).unwrap()).collect();
    assert_eq!(gpu.stats().synchronizes, 0);
    let kept: Vec<(usize, Tensor)> = tensors.into_iter().enumerate().filter(|(i, _)| i % 2 == 0).collect();
    let long = filled(&gpu, -1.0, 60).unwrap();
    assert_eq!(gpu.stats().synchronizes, 1);
    assert!(all_are(&long, -1.0));
    assert!(kept.iter().all(|(i, tensor)| all_are(tensor, *i as f32)));
}

#[test]
fn an_oom_reports_its_bytes_and_what_is_available() {
    let Some(gpu) = open_gpu(64 * MIB) else { return };
    let held = filled(&gpu, 1.0, 100).unwrap();
    let error = filled(&gpu, 1.0, 90).unwrap_err();
    assert!(is_out_of_memory(&error), "{error}");
    let (bytes, left) = gpu.take_last_oom().unwrap();
    assert_eq!((bytes, left), (90 * MIB, 60 * MIB));
    assert_eq!(gpu.take_last_oom(), None, "once");
    drop(held);
    assert!(filled(&gpu, 1.0, 90).is_ok());
}

/// Tensors may outlive their `GpuDevice`: the heap is released with the last of them.
#[test]
fn tensors_outlive_their_gpu() {
    let Some(gpu) = open_gpu(64 * MIB) else { return };
    let x = filled(&gpu, 5.0, 8).unwrap();
    drop(gpu);
    assert!(all_are(&x, 5.0));
}
