//! On a GPU alone (`TRAINER_TEST_DEVICE=cuda`): tensors come from the heap, keep their values when memory is moved, and are
//! refused at its capacity.

use candle_core::{DType, Device, Tensor};

use super::Card;
use crate::kernels::cuda::{fresh, from_host, is_out_of_memory};
use crate::layers::check;

const MIB: u64 = 1 << 20;

fn card(limit: u64) -> Option<Card> {
    let Device::Cuda(_) = check::device() else {
        eprintln!("skipped: no GPU is asked for");
        return None;
    };
    Some(Card::open(0, |_| limit).unwrap())
}

fn filled(card: &Card, value: f32, mib: u64) -> candle_core::Result<Tensor> {
    let Device::Cuda(device) = &card.device else { candle_core::bail!("no GPU") };
    let len = (mib * MIB / 4) as usize;
    let tensor = fresh(device, DType::F32, len)?;
    from_host(&tensor, &vec![value; len])?;
    Ok(tensor)
}

fn all_are(tensor: &Tensor, value: f32) -> bool {
    let (low, high) = (tensor.min(0).unwrap(), tensor.max(0).unwrap());
    [low, high].iter().all(|x| x.to_dtype(DType::F32).unwrap().to_scalar::<f32>().unwrap() == value)
}

#[test]
fn every_tensor_comes_from_the_heap() {
    let Some(card) = card(256 * MIB) else { return };
    let x = filled(&card, 2.0, 32).unwrap();
    assert!((32 * MIB..33 * MIB).contains(&card.heap().used()));
    let y = x.affine(3.0, 1.0).unwrap();
    assert!((64 * MIB..65 * MIB).contains(&card.heap().used()), "candle's own operations too");
    assert!(all_are(&y, 7.0));
    drop((x, y));
    assert_eq!(card.heap().used(), 0);
    assert!(card.take_recent_peak() >= 64 * MIB);
}

/// The capacity is 96 MiB beyond the limit, in chunks of 2 MiB: tensors of 20 MiB fill it, every other is freed, and a tensor
/// longer than any hole fits all the same, after one synchronize. Nothing that stays has moved.
#[test]
fn memory_that_is_moved_keeps_what_is_in_use() {
    let Some(card) = card(104 * MIB) else { return };
    let tensors: Vec<Tensor> = (0..10).map(|i| filled(&card, i as f32, 20).unwrap()).collect();
    assert_eq!(card.stats().synchronizes, 0);
    let kept: Vec<(usize, Tensor)> = tensors.into_iter().enumerate().filter(|(i, _)| i % 2 == 0).collect();
    let long = filled(&card, -1.0, 60).unwrap();
    assert_eq!(card.stats().synchronizes, 1);
    assert!(all_are(&long, -1.0));
    assert!(kept.iter().all(|(i, tensor)| all_are(tensor, *i as f32)));
}

#[test]
fn a_refusal_names_its_bytes_and_what_is_left() {
    let Some(card) = card(64 * MIB) else { return };
    let held = filled(&card, 1.0, 100).unwrap();
    let error = filled(&card, 1.0, 90).unwrap_err();
    assert!(is_out_of_memory(&error), "{error}");
    let (bytes, left) = card.refusal().unwrap();
    assert_eq!((bytes, left), (90 * MIB, 60 * MIB));
    assert_eq!(card.refusal(), None, "once");
    drop(held);
    assert!(filled(&card, 1.0, 90).is_ok());
}

/// Tensors may outlive their device's owner: the heap goes with the last of them.
#[test]
fn tensors_outlive_their_card() {
    let Some(card) = card(64 * MIB) else { return };
    let x = filled(&card, 5.0, 8).unwrap();
    drop(card);
    assert!(all_are(&x, 5.0));
}
