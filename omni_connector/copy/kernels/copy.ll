; clang 19, sha256 of the C d48f8584cb6fc00b
; scripts/compile_kernels.py has made this file.

%struct.state = type { [8 x i64], i64, i64 }

@SECRET = internal unnamed_addr constant [192 x i8] c"\B8\FEl9#\A4K\BE|\01\81,\F7!\AD\1C\DE\D4m\E9\83\90\97\DBr@\A4\A4\B7\B3g\1F\CBy\E6N\CC\C0\E5x\82Z\D0}\CC\FFr!\B8\08Ft\F7C$\8E\E05\90\E6\81:&L<(R\BB\91\C3\00\CB\88\D0e\8B\1BS.\A3qdH\97\A2\0D\F9N8\19\EFF\A9\DE\AC\D8\A8\FAv?\E3\9C4?\F9\DC\BB\C7\C7\0BO\1D\8AQ\E0K\CD\B4Y1\C8\9F~\C9\D9xsd\EA\C5\AC\834\D3\EB\C3\C5\81\A0\FF\FA\13c\EB\17\0D\DDQ\B7\F0\DAI\D3\16U&)\D4h\9E+\16\BEX}G\A1\FC\8F\F8\B8\D1z\D01\CEE\CB:\8F\95\16\04(\AF\D7\FB\CA\BBK@~", align 64

define void @copy(ptr %targets, ptr %sources, ptr %lengths, i64 %slots, i64 %rows, ptr %states) {
entry:
  %cmp.i18.not = icmp eq i64 %slots, 0
  br i1 %cmp.i18.not, label %run.exit, label %for.body.i.lr.ph

for.body.i.lr.ph:
  %cmp16.i12.not = icmp eq i64 %rows, 0
  %mul21.i = mul i64 %rows, %slots
  br label %for.body.i

for.body.i:
  %row.0.i20 = phi i64 [ 0, %for.body.i.lr.ph ], [ %row.1.i.lcssa, %for.cond.cleanup17.i ]
  %slot.0.i19 = phi i64 [ 0, %for.body.i.lr.ph ], [ %inc141.i, %for.cond.cleanup17.i ]
  br i1 %cmp16.i12.not, label %for.cond.cleanup17.i, label %for.body18.i

for.cond.cleanup17.i:
  %row.1.i.lcssa = phi i64 [ %row.0.i20, %for.body.i ], [ %add20.i, %for.cond.cleanup39.i ]
  %inc141.i = add i64 %slot.0.i19, 1
  %exitcond23.not = icmp eq i64 %inc141.i, %slots
  br i1 %exitcond23.not, label %run.exit, label %for.body.i

for.body18.i:
  %row.1.i16 = phi i64 [ %add20.i, %for.cond.cleanup39.i ], [ %row.0.i20, %for.body.i ]
  %j.0.i13 = phi i64 [ %inc119.i, %for.cond.cleanup39.i ], [ 0, %for.body.i ]
  %arrayidx19.i = getelementptr ptr, ptr %sources, i64 %row.1.i16
  %0 = load ptr, ptr %arrayidx19.i, align 8
  %add20.i = add i64 %row.1.i16, 1
  %cmp22.i = icmp ult i64 %add20.i, %mul21.i
  %cond.i = select i1 %cmp22.i, i64 %add20.i, i64 %row.1.i16
  %arrayidx24.i = getelementptr ptr, ptr %sources, i64 %cond.i
  %1 = load ptr, ptr %arrayidx24.i, align 8
  %arrayidx27.i = getelementptr ptr, ptr %targets, i64 %row.1.i16
  %2 = load ptr, ptr %arrayidx27.i, align 8
  %arrayidx31.i = getelementptr i64, ptr %lengths, i64 %j.0.i13
  %3 = load i64, ptr %arrayidx31.i, align 8
  %div218.i = lshr i64 %3, 6
  %cond36.i = tail call i64 @llvm.umin.i64(i64 %div218.i, i64 128)
  %cmp38.i7.not = icmp ult i64 %3, 64
  br i1 %cmp38.i7.not, label %for.cond.cleanup39.i, label %for.body40.i.lr.ph

for.body40.i.lr.ph:
  %mul48.i = shl i64 %cond36.i, 6
  br label %for.body40.i

for.cond.cleanup39.i:
  %inc119.i = add i64 %j.0.i13, 1
  %exitcond.not = icmp eq i64 %inc119.i, %rows
  br i1 %exitcond.not, label %for.cond.cleanup17.i, label %for.body18.i

for.body40.i:
  %i.0.i8 = phi i64 [ 0, %for.body40.i.lr.ph ], [ %inc109.i, %if.end110.i ]
  %mul41.i = shl i64 %i.0.i8, 6
  %add.ptr42.i = getelementptr i8, ptr %0, i64 %mul41.i
  %add.ptr44.i = getelementptr i8, ptr %2, i64 %mul41.i
  %add45.i = add i64 %i.0.i8, %cond36.i
  %cmp46.i = icmp ult i64 %add45.i, %div218.i
  %add.ptr49.i = getelementptr i8, ptr %add.ptr42.i, i64 %mul48.i
  %sub.i = sub i64 %add45.i, %div218.i
  %mul52.i = shl i64 %sub.i, 6
  %add.ptr53.i = getelementptr i8, ptr %1, i64 %mul52.i
  %cond55.i = select i1 %cmp46.i, ptr %add.ptr49.i, ptr %add.ptr53.i
  %sub57.i = sub i64 %div218.i, %i.0.i8
  %cmp58.i = icmp ugt i64 %sub57.i, 15
  tail call void @llvm.prefetch.p0(ptr %cond55.i, i32 0, i32 2, i32 1)
  %4 = load <8 x i64>, ptr %add.ptr42.i, align 1
  store <8 x i64> %4, ptr %add.ptr44.i, align 64, !nontemporal !0
  br i1 %cmp58.i, label %for.body67.i.preheader, label %if.end110.i

for.body67.i.preheader:
  %add.ptr69.i.1 = getelementptr i8, ptr %add.ptr42.i, i64 64
  %add.ptr71.i.1 = getelementptr i8, ptr %add.ptr44.i, i64 64
  %add.ptr73.i.1 = getelementptr i8, ptr %cond55.i, i64 64
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.1, i32 0, i32 2, i32 1)
  %5 = load <8 x i64>, ptr %add.ptr69.i.1, align 1
  store <8 x i64> %5, ptr %add.ptr71.i.1, align 64, !nontemporal !0
  %add.ptr69.i.2 = getelementptr i8, ptr %add.ptr42.i, i64 128
  %add.ptr71.i.2 = getelementptr i8, ptr %add.ptr44.i, i64 128
  %add.ptr73.i.2 = getelementptr i8, ptr %cond55.i, i64 128
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.2, i32 0, i32 2, i32 1)
  %6 = load <8 x i64>, ptr %add.ptr69.i.2, align 1
  store <8 x i64> %6, ptr %add.ptr71.i.2, align 64, !nontemporal !0
  %add.ptr69.i.3 = getelementptr i8, ptr %add.ptr42.i, i64 192
  %add.ptr71.i.3 = getelementptr i8, ptr %add.ptr44.i, i64 192
  %add.ptr73.i.3 = getelementptr i8, ptr %cond55.i, i64 192
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.3, i32 0, i32 2, i32 1)
  %7 = load <8 x i64>, ptr %add.ptr69.i.3, align 1
  store <8 x i64> %7, ptr %add.ptr71.i.3, align 64, !nontemporal !0
  %add.ptr69.i.4 = getelementptr i8, ptr %add.ptr42.i, i64 256
  %add.ptr71.i.4 = getelementptr i8, ptr %add.ptr44.i, i64 256
  %add.ptr73.i.4 = getelementptr i8, ptr %cond55.i, i64 256
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.4, i32 0, i32 2, i32 1)
  %8 = load <8 x i64>, ptr %add.ptr69.i.4, align 1
  store <8 x i64> %8, ptr %add.ptr71.i.4, align 64, !nontemporal !0
  %add.ptr69.i.5 = getelementptr i8, ptr %add.ptr42.i, i64 320
  %add.ptr71.i.5 = getelementptr i8, ptr %add.ptr44.i, i64 320
  %add.ptr73.i.5 = getelementptr i8, ptr %cond55.i, i64 320
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.5, i32 0, i32 2, i32 1)
  %9 = load <8 x i64>, ptr %add.ptr69.i.5, align 1
  store <8 x i64> %9, ptr %add.ptr71.i.5, align 64, !nontemporal !0
  %add.ptr69.i.6 = getelementptr i8, ptr %add.ptr42.i, i64 384
  %add.ptr71.i.6 = getelementptr i8, ptr %add.ptr44.i, i64 384
  %add.ptr73.i.6 = getelementptr i8, ptr %cond55.i, i64 384
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.6, i32 0, i32 2, i32 1)
  %10 = load <8 x i64>, ptr %add.ptr69.i.6, align 1
  store <8 x i64> %10, ptr %add.ptr71.i.6, align 64, !nontemporal !0
  %add.ptr69.i.7 = getelementptr i8, ptr %add.ptr42.i, i64 448
  %add.ptr71.i.7 = getelementptr i8, ptr %add.ptr44.i, i64 448
  %add.ptr73.i.7 = getelementptr i8, ptr %cond55.i, i64 448
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.7, i32 0, i32 2, i32 1)
  %11 = load <8 x i64>, ptr %add.ptr69.i.7, align 1
  store <8 x i64> %11, ptr %add.ptr71.i.7, align 64, !nontemporal !0
  %add.ptr69.i.8 = getelementptr i8, ptr %add.ptr42.i, i64 512
  %add.ptr71.i.8 = getelementptr i8, ptr %add.ptr44.i, i64 512
  %add.ptr73.i.8 = getelementptr i8, ptr %cond55.i, i64 512
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.8, i32 0, i32 2, i32 1)
  %12 = load <8 x i64>, ptr %add.ptr69.i.8, align 1
  store <8 x i64> %12, ptr %add.ptr71.i.8, align 64, !nontemporal !0
  %add.ptr69.i.9 = getelementptr i8, ptr %add.ptr42.i, i64 576
  %add.ptr71.i.9 = getelementptr i8, ptr %add.ptr44.i, i64 576
  %add.ptr73.i.9 = getelementptr i8, ptr %cond55.i, i64 576
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.9, i32 0, i32 2, i32 1)
  %13 = load <8 x i64>, ptr %add.ptr69.i.9, align 1
  store <8 x i64> %13, ptr %add.ptr71.i.9, align 64, !nontemporal !0
  %add.ptr69.i.10 = getelementptr i8, ptr %add.ptr42.i, i64 640
  %add.ptr71.i.10 = getelementptr i8, ptr %add.ptr44.i, i64 640
  %add.ptr73.i.10 = getelementptr i8, ptr %cond55.i, i64 640
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.10, i32 0, i32 2, i32 1)
  %14 = load <8 x i64>, ptr %add.ptr69.i.10, align 1
  store <8 x i64> %14, ptr %add.ptr71.i.10, align 64, !nontemporal !0
  %add.ptr69.i.11 = getelementptr i8, ptr %add.ptr42.i, i64 704
  %add.ptr71.i.11 = getelementptr i8, ptr %add.ptr44.i, i64 704
  %add.ptr73.i.11 = getelementptr i8, ptr %cond55.i, i64 704
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.11, i32 0, i32 2, i32 1)
  %15 = load <8 x i64>, ptr %add.ptr69.i.11, align 1
  store <8 x i64> %15, ptr %add.ptr71.i.11, align 64, !nontemporal !0
  %add.ptr69.i.12 = getelementptr i8, ptr %add.ptr42.i, i64 768
  %add.ptr71.i.12 = getelementptr i8, ptr %add.ptr44.i, i64 768
  %add.ptr73.i.12 = getelementptr i8, ptr %cond55.i, i64 768
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.12, i32 0, i32 2, i32 1)
  %16 = load <8 x i64>, ptr %add.ptr69.i.12, align 1
  store <8 x i64> %16, ptr %add.ptr71.i.12, align 64, !nontemporal !0
  %add.ptr69.i.13 = getelementptr i8, ptr %add.ptr42.i, i64 832
  %add.ptr71.i.13 = getelementptr i8, ptr %add.ptr44.i, i64 832
  %add.ptr73.i.13 = getelementptr i8, ptr %cond55.i, i64 832
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.13, i32 0, i32 2, i32 1)
  %17 = load <8 x i64>, ptr %add.ptr69.i.13, align 1
  store <8 x i64> %17, ptr %add.ptr71.i.13, align 64, !nontemporal !0
  %add.ptr69.i.14 = getelementptr i8, ptr %add.ptr42.i, i64 896
  %add.ptr71.i.14 = getelementptr i8, ptr %add.ptr44.i, i64 896
  %add.ptr73.i.14 = getelementptr i8, ptr %cond55.i, i64 896
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.14, i32 0, i32 2, i32 1)
  %18 = load <8 x i64>, ptr %add.ptr69.i.14, align 1
  store <8 x i64> %18, ptr %add.ptr71.i.14, align 64, !nontemporal !0
  %add.ptr69.i.15 = getelementptr i8, ptr %add.ptr42.i, i64 960
  %add.ptr71.i.15 = getelementptr i8, ptr %add.ptr44.i, i64 960
  %add.ptr73.i.15 = getelementptr i8, ptr %cond55.i, i64 960
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.15, i32 0, i32 2, i32 1)
  %19 = load <8 x i64>, ptr %add.ptr69.i.15, align 1
  store <8 x i64> %19, ptr %add.ptr71.i.15, align 64, !nontemporal !0
  br label %if.end110.i

if.end110.i:
  %.sink = phi i64 [ 16, %for.body67.i.preheader ], [ 1, %for.body40.i ]
  %inc109.i = add i64 %i.0.i8, %.sink
  %cmp38.i = icmp ult i64 %inc109.i, %div218.i
  br i1 %cmp38.i, label %for.body40.i, label %for.cond.cleanup39.i

run.exit:
  fence seq_cst
  ret void
}

define void @copy_hashed(ptr %targets, ptr %sources, ptr %lengths, i64 %slots, i64 %rows, ptr %states) {
entry:
  %cmp.i38.not = icmp eq i64 %slots, 0
  br i1 %cmp.i38.not, label %run.exit, label %for.body.i.lr.ph

for.body.i.lr.ph:
  %cmp16.i30.not = icmp eq i64 %rows, 0
  %mul21.i = mul i64 %rows, %slots
  %0 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 128), align 64
  %1 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 11), align 1
  %2 = load <8 x i64>, ptr @SECRET, align 64
  %3 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 8), align 8
  %4 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 16), align 16
  %5 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 24), align 8
  %6 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 32), align 32
  %7 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 40), align 8
  %8 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 48), align 16
  %9 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 56), align 8
  %10 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 64), align 64
  %11 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 72), align 8
  %12 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 80), align 16
  %13 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 88), align 8
  %14 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 96), align 32
  %15 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 104), align 8
  %16 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 112), align 16
  %17 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 120), align 8
  br label %for.body.i

for.body.i:
  %row.0.i40 = phi i64 [ 0, %for.body.i.lr.ph ], [ %row.1.i.lcssa, %if.end139.i ]
  %slot.0.i39 = phi i64 [ 0, %for.body.i.lr.ph ], [ %inc141.i, %if.end139.i ]
  %arrayidx.i = getelementptr %struct.state, ptr %states, i64 %slot.0.i39
  %18 = load <8 x i64>, ptr %arrayidx.i, align 1
  %left2.i = getelementptr i8, ptr %arrayidx.i, i64 64
  %19 = load i64, ptr %left2.i, align 8
  %total3.i = getelementptr i8, ptr %arrayidx.i, i64 72
  %20 = load i64, ptr %total3.i, align 8
  br i1 %cmp16.i30.not, label %for.cond.cleanup17.i, label %for.body18.i

for.cond.cleanup17.i.loopexit:
  %.pre = load i64, ptr %left2.i, align 8
  br label %for.cond.cleanup17.i

for.cond.cleanup17.i:
  %21 = phi i64 [ %19, %for.body.i ], [ %.pre, %for.cond.cleanup17.i.loopexit ]
  %left.0.i.lcssa = phi i64 [ %19, %for.body.i ], [ %left.1.i.lcssa, %for.cond.cleanup17.i.loopexit ]
  %sums.0.i.lcssa = phi <8 x i64> [ %18, %for.body.i ], [ %sums.1.i.lcssa, %for.cond.cleanup17.i.loopexit ]
  %row.1.i.lcssa = phi i64 [ %row.0.i40, %for.body.i ], [ %add20.i, %for.cond.cleanup17.i.loopexit ]
  %cmp125.not.i = icmp eq i64 %21, 0
  br i1 %cmp125.not.i, label %if.end139.i, label %if.then127.i

for.body18.i:
  %row.1.i34 = phi i64 [ %add20.i, %for.cond.cleanup39.i ], [ %row.0.i40, %for.body.i ]
  %sums.0.i33 = phi <8 x i64> [ %sums.1.i.lcssa, %for.cond.cleanup39.i ], [ %18, %for.body.i ]
  %left.0.i32 = phi i64 [ %left.1.i.lcssa, %for.cond.cleanup39.i ], [ %19, %for.body.i ]
  %j.0.i31 = phi i64 [ %inc119.i, %for.cond.cleanup39.i ], [ 0, %for.body.i ]
  %arrayidx19.i = getelementptr ptr, ptr %sources, i64 %row.1.i34
  %22 = load ptr, ptr %arrayidx19.i, align 8
  %add20.i = add i64 %row.1.i34, 1
  %cmp22.i = icmp ult i64 %add20.i, %mul21.i
  %cond.i = select i1 %cmp22.i, i64 %add20.i, i64 %row.1.i34
  %arrayidx24.i = getelementptr ptr, ptr %sources, i64 %cond.i
  %23 = load ptr, ptr %arrayidx24.i, align 8
  %arrayidx27.i = getelementptr ptr, ptr %targets, i64 %row.1.i34
  %24 = load ptr, ptr %arrayidx27.i, align 8
  %arrayidx31.i = getelementptr i64, ptr %lengths, i64 %j.0.i31
  %25 = load i64, ptr %arrayidx31.i, align 8
  %div218.i = lshr i64 %25, 6
  %cond36.i = tail call i64 @llvm.umin.i64(i64 %div218.i, i64 128)
  %cmp38.i25.not = icmp ult i64 %25, 64
  br i1 %cmp38.i25.not, label %for.cond.cleanup39.i, label %for.body40.i.lr.ph

for.body40.i.lr.ph:
  %mul48.i = shl i64 %cond36.i, 6
  br label %for.body40.i

for.cond.cleanup39.i:
  %left.1.i.lcssa = phi i64 [ %left.0.i32, %for.body18.i ], [ %dec.i, %if.end110.i ]
  %sums.1.i.lcssa = phi <8 x i64> [ %sums.0.i33, %for.body18.i ], [ %sums.6.i, %if.end110.i ]
  %inc119.i = add i64 %j.0.i31, 1
  %exitcond.not = icmp eq i64 %inc119.i, %rows
  br i1 %exitcond.not, label %for.cond.cleanup17.i.loopexit, label %for.body18.i

for.body40.i:
  %sums.1.i28 = phi <8 x i64> [ %sums.0.i33, %for.body40.i.lr.ph ], [ %sums.6.i, %if.end110.i ]
  %left.1.i27 = phi i64 [ %left.0.i32, %for.body40.i.lr.ph ], [ %dec.i, %if.end110.i ]
  %i.0.i26 = phi i64 [ 0, %for.body40.i.lr.ph ], [ %inc109.i, %if.end110.i ]
  %mul41.i = shl i64 %i.0.i26, 6
  %add.ptr42.i = getelementptr i8, ptr %22, i64 %mul41.i
  %add.ptr44.i = getelementptr i8, ptr %24, i64 %mul41.i
  %add45.i = add i64 %i.0.i26, %cond36.i
  %cmp46.i = icmp ult i64 %add45.i, %div218.i
  %add.ptr49.i = getelementptr i8, ptr %add.ptr42.i, i64 %mul48.i
  %sub.i = sub i64 %add45.i, %div218.i
  %mul52.i = shl i64 %sub.i, 6
  %add.ptr53.i = getelementptr i8, ptr %23, i64 %mul52.i
  %cond55.i = select i1 %cmp46.i, ptr %add.ptr49.i, ptr %add.ptr53.i
  %sub56.i = sub i64 %20, %left.1.i27
  %rem.i = and i64 %sub56.i, 15
  %sub57.i = sub i64 %div218.i, %i.0.i26
  %cmp58.i = icmp ugt i64 %sub57.i, 15
  br i1 %cmp58.i, label %land.lhs.true.i, label %if.else.i

land.lhs.true.i:
  %cmp60.i = icmp eq i64 %rem.i, 0
  %cmp62.i = icmp ugt i64 %left.1.i27, 16
  %or.cond.i = select i1 %cmp60.i, i1 %cmp62.i, i1 false
  br i1 %or.cond.i, label %for.body67.i.preheader, label %if.else.i

for.body67.i.preheader:
  tail call void @llvm.prefetch.p0(ptr %cond55.i, i32 0, i32 2, i32 1)
  %26 = load <8 x i64>, ptr %add.ptr42.i, align 1
  store <8 x i64> %26, ptr %add.ptr44.i, align 64, !nontemporal !0
  %xor.i = xor <8 x i64> %2, %26
  %shuffle.i = shufflevector <8 x i64> %26, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i = add <8 x i64> %shuffle.i, %sums.1.i28
  %and.i = and <8 x i64> %xor.i, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4 = lshr <8 x i64> %xor.i, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5 = mul <8 x i64> %and.i, %shr.i4
  %add1.i = add <8 x i64> %add.i, %mul.i5
  %add.ptr69.i.1 = getelementptr i8, ptr %add.ptr42.i, i64 64
  %add.ptr71.i.1 = getelementptr i8, ptr %add.ptr44.i, i64 64
  %add.ptr73.i.1 = getelementptr i8, ptr %cond55.i, i64 64
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.1, i32 0, i32 2, i32 1)
  %27 = load <8 x i64>, ptr %add.ptr69.i.1, align 1
  store <8 x i64> %27, ptr %add.ptr71.i.1, align 64, !nontemporal !0
  %xor.i.1 = xor <8 x i64> %3, %27
  %shuffle.i.1 = shufflevector <8 x i64> %27, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.1 = add <8 x i64> %shuffle.i.1, %add1.i
  %and.i.1 = and <8 x i64> %xor.i.1, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.1 = lshr <8 x i64> %xor.i.1, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.1 = mul <8 x i64> %and.i.1, %shr.i4.1
  %add1.i.1 = add <8 x i64> %add.i.1, %mul.i5.1
  %add.ptr69.i.2 = getelementptr i8, ptr %add.ptr42.i, i64 128
  %add.ptr71.i.2 = getelementptr i8, ptr %add.ptr44.i, i64 128
  %add.ptr73.i.2 = getelementptr i8, ptr %cond55.i, i64 128
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.2, i32 0, i32 2, i32 1)
  %28 = load <8 x i64>, ptr %add.ptr69.i.2, align 1
  store <8 x i64> %28, ptr %add.ptr71.i.2, align 64, !nontemporal !0
  %xor.i.2 = xor <8 x i64> %4, %28
  %shuffle.i.2 = shufflevector <8 x i64> %28, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.2 = add <8 x i64> %shuffle.i.2, %add1.i.1
  %and.i.2 = and <8 x i64> %xor.i.2, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.2 = lshr <8 x i64> %xor.i.2, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.2 = mul <8 x i64> %and.i.2, %shr.i4.2
  %add1.i.2 = add <8 x i64> %add.i.2, %mul.i5.2
  %add.ptr69.i.3 = getelementptr i8, ptr %add.ptr42.i, i64 192
  %add.ptr71.i.3 = getelementptr i8, ptr %add.ptr44.i, i64 192
  %add.ptr73.i.3 = getelementptr i8, ptr %cond55.i, i64 192
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.3, i32 0, i32 2, i32 1)
  %29 = load <8 x i64>, ptr %add.ptr69.i.3, align 1
  store <8 x i64> %29, ptr %add.ptr71.i.3, align 64, !nontemporal !0
  %xor.i.3 = xor <8 x i64> %5, %29
  %shuffle.i.3 = shufflevector <8 x i64> %29, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.3 = add <8 x i64> %shuffle.i.3, %add1.i.2
  %and.i.3 = and <8 x i64> %xor.i.3, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.3 = lshr <8 x i64> %xor.i.3, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.3 = mul <8 x i64> %and.i.3, %shr.i4.3
  %add1.i.3 = add <8 x i64> %add.i.3, %mul.i5.3
  %add.ptr69.i.4 = getelementptr i8, ptr %add.ptr42.i, i64 256
  %add.ptr71.i.4 = getelementptr i8, ptr %add.ptr44.i, i64 256
  %add.ptr73.i.4 = getelementptr i8, ptr %cond55.i, i64 256
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.4, i32 0, i32 2, i32 1)
  %30 = load <8 x i64>, ptr %add.ptr69.i.4, align 1
  store <8 x i64> %30, ptr %add.ptr71.i.4, align 64, !nontemporal !0
  %xor.i.4 = xor <8 x i64> %6, %30
  %shuffle.i.4 = shufflevector <8 x i64> %30, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.4 = add <8 x i64> %shuffle.i.4, %add1.i.3
  %and.i.4 = and <8 x i64> %xor.i.4, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.4 = lshr <8 x i64> %xor.i.4, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.4 = mul <8 x i64> %and.i.4, %shr.i4.4
  %add1.i.4 = add <8 x i64> %add.i.4, %mul.i5.4
  %add.ptr69.i.5 = getelementptr i8, ptr %add.ptr42.i, i64 320
  %add.ptr71.i.5 = getelementptr i8, ptr %add.ptr44.i, i64 320
  %add.ptr73.i.5 = getelementptr i8, ptr %cond55.i, i64 320
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.5, i32 0, i32 2, i32 1)
  %31 = load <8 x i64>, ptr %add.ptr69.i.5, align 1
  store <8 x i64> %31, ptr %add.ptr71.i.5, align 64, !nontemporal !0
  %xor.i.5 = xor <8 x i64> %7, %31
  %shuffle.i.5 = shufflevector <8 x i64> %31, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.5 = add <8 x i64> %shuffle.i.5, %add1.i.4
  %and.i.5 = and <8 x i64> %xor.i.5, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.5 = lshr <8 x i64> %xor.i.5, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.5 = mul <8 x i64> %and.i.5, %shr.i4.5
  %add1.i.5 = add <8 x i64> %add.i.5, %mul.i5.5
  %add.ptr69.i.6 = getelementptr i8, ptr %add.ptr42.i, i64 384
  %add.ptr71.i.6 = getelementptr i8, ptr %add.ptr44.i, i64 384
  %add.ptr73.i.6 = getelementptr i8, ptr %cond55.i, i64 384
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.6, i32 0, i32 2, i32 1)
  %32 = load <8 x i64>, ptr %add.ptr69.i.6, align 1
  store <8 x i64> %32, ptr %add.ptr71.i.6, align 64, !nontemporal !0
  %xor.i.6 = xor <8 x i64> %8, %32
  %shuffle.i.6 = shufflevector <8 x i64> %32, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.6 = add <8 x i64> %shuffle.i.6, %add1.i.5
  %and.i.6 = and <8 x i64> %xor.i.6, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.6 = lshr <8 x i64> %xor.i.6, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.6 = mul <8 x i64> %and.i.6, %shr.i4.6
  %add1.i.6 = add <8 x i64> %add.i.6, %mul.i5.6
  %add.ptr69.i.7 = getelementptr i8, ptr %add.ptr42.i, i64 448
  %add.ptr71.i.7 = getelementptr i8, ptr %add.ptr44.i, i64 448
  %add.ptr73.i.7 = getelementptr i8, ptr %cond55.i, i64 448
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.7, i32 0, i32 2, i32 1)
  %33 = load <8 x i64>, ptr %add.ptr69.i.7, align 1
  store <8 x i64> %33, ptr %add.ptr71.i.7, align 64, !nontemporal !0
  %xor.i.7 = xor <8 x i64> %9, %33
  %shuffle.i.7 = shufflevector <8 x i64> %33, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.7 = add <8 x i64> %shuffle.i.7, %add1.i.6
  %and.i.7 = and <8 x i64> %xor.i.7, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.7 = lshr <8 x i64> %xor.i.7, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.7 = mul <8 x i64> %and.i.7, %shr.i4.7
  %add1.i.7 = add <8 x i64> %add.i.7, %mul.i5.7
  %add.ptr69.i.8 = getelementptr i8, ptr %add.ptr42.i, i64 512
  %add.ptr71.i.8 = getelementptr i8, ptr %add.ptr44.i, i64 512
  %add.ptr73.i.8 = getelementptr i8, ptr %cond55.i, i64 512
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.8, i32 0, i32 2, i32 1)
  %34 = load <8 x i64>, ptr %add.ptr69.i.8, align 1
  store <8 x i64> %34, ptr %add.ptr71.i.8, align 64, !nontemporal !0
  %xor.i.8 = xor <8 x i64> %10, %34
  %shuffle.i.8 = shufflevector <8 x i64> %34, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.8 = add <8 x i64> %shuffle.i.8, %add1.i.7
  %and.i.8 = and <8 x i64> %xor.i.8, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.8 = lshr <8 x i64> %xor.i.8, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.8 = mul <8 x i64> %and.i.8, %shr.i4.8
  %add1.i.8 = add <8 x i64> %add.i.8, %mul.i5.8
  %add.ptr69.i.9 = getelementptr i8, ptr %add.ptr42.i, i64 576
  %add.ptr71.i.9 = getelementptr i8, ptr %add.ptr44.i, i64 576
  %add.ptr73.i.9 = getelementptr i8, ptr %cond55.i, i64 576
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.9, i32 0, i32 2, i32 1)
  %35 = load <8 x i64>, ptr %add.ptr69.i.9, align 1
  store <8 x i64> %35, ptr %add.ptr71.i.9, align 64, !nontemporal !0
  %xor.i.9 = xor <8 x i64> %11, %35
  %shuffle.i.9 = shufflevector <8 x i64> %35, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.9 = add <8 x i64> %shuffle.i.9, %add1.i.8
  %and.i.9 = and <8 x i64> %xor.i.9, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.9 = lshr <8 x i64> %xor.i.9, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.9 = mul <8 x i64> %and.i.9, %shr.i4.9
  %add1.i.9 = add <8 x i64> %add.i.9, %mul.i5.9
  %add.ptr69.i.10 = getelementptr i8, ptr %add.ptr42.i, i64 640
  %add.ptr71.i.10 = getelementptr i8, ptr %add.ptr44.i, i64 640
  %add.ptr73.i.10 = getelementptr i8, ptr %cond55.i, i64 640
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.10, i32 0, i32 2, i32 1)
  %36 = load <8 x i64>, ptr %add.ptr69.i.10, align 1
  store <8 x i64> %36, ptr %add.ptr71.i.10, align 64, !nontemporal !0
  %xor.i.10 = xor <8 x i64> %12, %36
  %shuffle.i.10 = shufflevector <8 x i64> %36, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.10 = add <8 x i64> %shuffle.i.10, %add1.i.9
  %and.i.10 = and <8 x i64> %xor.i.10, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.10 = lshr <8 x i64> %xor.i.10, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.10 = mul <8 x i64> %and.i.10, %shr.i4.10
  %add1.i.10 = add <8 x i64> %add.i.10, %mul.i5.10
  %add.ptr69.i.11 = getelementptr i8, ptr %add.ptr42.i, i64 704
  %add.ptr71.i.11 = getelementptr i8, ptr %add.ptr44.i, i64 704
  %add.ptr73.i.11 = getelementptr i8, ptr %cond55.i, i64 704
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.11, i32 0, i32 2, i32 1)
  %37 = load <8 x i64>, ptr %add.ptr69.i.11, align 1
  store <8 x i64> %37, ptr %add.ptr71.i.11, align 64, !nontemporal !0
  %xor.i.11 = xor <8 x i64> %13, %37
  %shuffle.i.11 = shufflevector <8 x i64> %37, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.11 = add <8 x i64> %shuffle.i.11, %add1.i.10
  %and.i.11 = and <8 x i64> %xor.i.11, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.11 = lshr <8 x i64> %xor.i.11, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.11 = mul <8 x i64> %and.i.11, %shr.i4.11
  %add1.i.11 = add <8 x i64> %add.i.11, %mul.i5.11
  %add.ptr69.i.12 = getelementptr i8, ptr %add.ptr42.i, i64 768
  %add.ptr71.i.12 = getelementptr i8, ptr %add.ptr44.i, i64 768
  %add.ptr73.i.12 = getelementptr i8, ptr %cond55.i, i64 768
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.12, i32 0, i32 2, i32 1)
  %38 = load <8 x i64>, ptr %add.ptr69.i.12, align 1
  store <8 x i64> %38, ptr %add.ptr71.i.12, align 64, !nontemporal !0
  %xor.i.12 = xor <8 x i64> %14, %38
  %shuffle.i.12 = shufflevector <8 x i64> %38, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.12 = add <8 x i64> %shuffle.i.12, %add1.i.11
  %and.i.12 = and <8 x i64> %xor.i.12, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.12 = lshr <8 x i64> %xor.i.12, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.12 = mul <8 x i64> %and.i.12, %shr.i4.12
  %add1.i.12 = add <8 x i64> %add.i.12, %mul.i5.12
  %add.ptr69.i.13 = getelementptr i8, ptr %add.ptr42.i, i64 832
  %add.ptr71.i.13 = getelementptr i8, ptr %add.ptr44.i, i64 832
  %add.ptr73.i.13 = getelementptr i8, ptr %cond55.i, i64 832
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.13, i32 0, i32 2, i32 1)
  %39 = load <8 x i64>, ptr %add.ptr69.i.13, align 1
  store <8 x i64> %39, ptr %add.ptr71.i.13, align 64, !nontemporal !0
  %xor.i.13 = xor <8 x i64> %15, %39
  %shuffle.i.13 = shufflevector <8 x i64> %39, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.13 = add <8 x i64> %shuffle.i.13, %add1.i.12
  %and.i.13 = and <8 x i64> %xor.i.13, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.13 = lshr <8 x i64> %xor.i.13, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.13 = mul <8 x i64> %and.i.13, %shr.i4.13
  %add1.i.13 = add <8 x i64> %add.i.13, %mul.i5.13
  %add.ptr69.i.14 = getelementptr i8, ptr %add.ptr42.i, i64 896
  %add.ptr71.i.14 = getelementptr i8, ptr %add.ptr44.i, i64 896
  %add.ptr73.i.14 = getelementptr i8, ptr %cond55.i, i64 896
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.14, i32 0, i32 2, i32 1)
  %40 = load <8 x i64>, ptr %add.ptr69.i.14, align 1
  store <8 x i64> %40, ptr %add.ptr71.i.14, align 64, !nontemporal !0
  %xor.i.14 = xor <8 x i64> %16, %40
  %shuffle.i.14 = shufflevector <8 x i64> %40, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.14 = add <8 x i64> %shuffle.i.14, %add1.i.13
  %and.i.14 = and <8 x i64> %xor.i.14, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.14 = lshr <8 x i64> %xor.i.14, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.14 = mul <8 x i64> %and.i.14, %shr.i4.14
  %add1.i.14 = add <8 x i64> %add.i.14, %mul.i5.14
  %add.ptr69.i.15 = getelementptr i8, ptr %add.ptr42.i, i64 960
  %add.ptr71.i.15 = getelementptr i8, ptr %add.ptr44.i, i64 960
  %add.ptr73.i.15 = getelementptr i8, ptr %cond55.i, i64 960
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.15, i32 0, i32 2, i32 1)
  %41 = load <8 x i64>, ptr %add.ptr69.i.15, align 1
  store <8 x i64> %41, ptr %add.ptr71.i.15, align 64, !nontemporal !0
  %xor.i.15 = xor <8 x i64> %17, %41
  %shuffle.i.15 = shufflevector <8 x i64> %41, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.15 = add <8 x i64> %shuffle.i.15, %add1.i.14
  %and.i.15 = and <8 x i64> %xor.i.15, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.15 = lshr <8 x i64> %xor.i.15, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.15 = mul <8 x i64> %and.i.15, %shr.i4.15
  %add1.i.15 = add <8 x i64> %add.i.15, %mul.i5.15
  %shr.i = lshr <8 x i64> %add1.i.15, <i64 47, i64 47, i64 47, i64 47, i64 47, i64 47, i64 47, i64 47>
  %42 = xor <8 x i64> %shr.i, %add1.i.15
  %xor1.i = xor <8 x i64> %42, %0
  %mul.i = mul <8 x i64> %xor1.i, <i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761>
  br label %if.end110.i

if.else.i:
  tail call void @llvm.prefetch.p0(ptr %cond55.i, i32 0, i32 2, i32 1)
  %43 = load <8 x i64>, ptr %add.ptr42.i, align 1
  store <8 x i64> %43, ptr %add.ptr44.i, align 64, !nontemporal !0
  %cmp92.i = icmp eq i64 %left.1.i27, 1
  %mul95.i = shl i64 %rem.i, 3
  %cond97.i = select i1 %cmp92.i, i64 121, i64 %mul95.i
  %add.ptr98.i = getelementptr i8, ptr @SECRET, i64 %cond97.i
  %44 = load <8 x i64>, ptr %add.ptr98.i, align 1
  %xor.i8 = xor <8 x i64> %44, %43
  %shuffle.i9 = shufflevector <8 x i64> %43, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i10 = add <8 x i64> %shuffle.i9, %sums.1.i28
  %and.i11 = and <8 x i64> %xor.i8, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i12 = lshr <8 x i64> %xor.i8, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i13 = mul <8 x i64> %and.i11, %shr.i12
  %add1.i14 = add <8 x i64> %add.i10, %mul.i13
  %cmp102.i = icmp eq i64 %rem.i, 15
  %cmp104.i = icmp ugt i64 %left.1.i27, 1
  %or.cond143.i = select i1 %cmp102.i, i1 %cmp104.i, i1 false
  br i1 %or.cond143.i, label %if.then105.i, label %if.end110.i

if.then105.i:
  %shr.i16 = lshr <8 x i64> %add1.i14, <i64 47, i64 47, i64 47, i64 47, i64 47, i64 47, i64 47, i64 47>
  %45 = xor <8 x i64> %shr.i16, %add1.i14
  %xor1.i17 = xor <8 x i64> %45, %0
  %mul.i18 = mul <8 x i64> %xor1.i17, <i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761>
  br label %if.end110.i

if.end110.i:
  %.sink45 = phi i64 [ 16, %for.body67.i.preheader ], [ 1, %if.then105.i ], [ 1, %if.else.i ]
  %.sink = phi i64 [ -16, %for.body67.i.preheader ], [ -1, %if.then105.i ], [ -1, %if.else.i ]
  %sums.6.i = phi <8 x i64> [ %mul.i, %for.body67.i.preheader ], [ %mul.i18, %if.then105.i ], [ %add1.i14, %if.else.i ]
  %inc109.i = add i64 %i.0.i26, %.sink45
  %dec.i = add i64 %left.1.i27, %.sink
  %cmp38.i = icmp ult i64 %inc109.i, %div218.i
  br i1 %cmp38.i, label %for.body40.i, label %for.cond.cleanup39.i

if.then127.i:
  store <8 x i64> %sums.0.i.lcssa, ptr %arrayidx.i, align 8
  store i64 %left.0.i.lcssa, ptr %left2.i, align 8
  %cmp131.i = icmp eq i64 %left.0.i.lcssa, 0
  br i1 %cmp131.i, label %if.then133.i, label %if.end139.i

if.then133.i:
  %xor.i20 = xor <8 x i64> %1, %sums.0.i.lcssa
  %mul.i21 = mul i64 %20, -8224016703601598016
  %vecext.i = extractelement <8 x i64> %xor.i20, i64 0
  %conv.i = zext i64 %vecext.i to i128
  %vecext1.i = extractelement <8 x i64> %xor.i20, i64 1
  %conv2.i = zext i64 %vecext1.i to i128
  %mul3.i = mul i128 %conv2.i, %conv.i
  %shr.i22 = lshr i128 %mul3.i, 64
  %xor616.i = xor i128 %shr.i22, %mul3.i
  %xor6.i = trunc i128 %xor616.i to i64
  %add7.i = add i64 %mul.i21, %xor6.i
  %vecext.1.i = extractelement <8 x i64> %xor.i20, i64 2
  %conv.1.i = zext i64 %vecext.1.i to i128
  %vecext1.1.i = extractelement <8 x i64> %xor.i20, i64 3
  %conv2.1.i = zext i64 %vecext1.1.i to i128
  %mul3.1.i = mul i128 %conv2.1.i, %conv.1.i
  %shr.1.i = lshr i128 %mul3.1.i, 64
  %xor616.1.i = xor i128 %shr.1.i, %mul3.1.i
  %xor6.1.i = trunc i128 %xor616.1.i to i64
  %add7.1.i = add i64 %add7.i, %xor6.1.i
  %vecext.2.i = extractelement <8 x i64> %xor.i20, i64 4
  %conv.2.i = zext i64 %vecext.2.i to i128
  %vecext1.2.i = extractelement <8 x i64> %xor.i20, i64 5
  %conv2.2.i = zext i64 %vecext1.2.i to i128
  %mul3.2.i = mul i128 %conv2.2.i, %conv.2.i
  %shr.2.i = lshr i128 %mul3.2.i, 64
  %xor616.2.i = xor i128 %shr.2.i, %mul3.2.i
  %xor6.2.i = trunc i128 %xor616.2.i to i64
  %add7.2.i = add i64 %add7.1.i, %xor6.2.i
  %vecext.3.i = extractelement <8 x i64> %xor.i20, i64 6
  %conv.3.i = zext i64 %vecext.3.i to i128
  %vecext1.3.i = extractelement <8 x i64> %xor.i20, i64 7
  %conv2.3.i = zext i64 %vecext1.3.i to i128
  %mul3.3.i = mul i128 %conv2.3.i, %conv.3.i
  %shr.3.i = lshr i128 %mul3.3.i, 64
  %xor616.3.i = xor i128 %shr.3.i, %mul3.3.i
  %xor6.3.i = trunc i128 %xor616.3.i to i64
  %add7.3.i = add i64 %add7.2.i, %xor6.3.i
  %shr.i.i = lshr i64 %add7.3.i, 37
  %xor.i.i = xor i64 %shr.i.i, %add7.3.i
  %mul.i.i = mul i64 %xor.i.i, 1609587791953885689
  %shr1.i.i = lshr i64 %mul.i.i, 32
  %xor2.i.i = xor i64 %shr1.i.i, %mul.i.i
  store i64 %xor2.i.i, ptr %total3.i, align 8
  br label %if.end139.i

if.end139.i:
  %inc141.i = add i64 %slot.0.i39, 1
  %exitcond44.not = icmp eq i64 %inc141.i, %slots
  br i1 %exitcond44.not, label %run.exit, label %for.body.i

run.exit:
  fence seq_cst
  ret void
}

define void @copy_keeping(ptr %targets, ptr %sources, ptr %lengths, i64 %slots, i64 %rows, ptr %states, ptr %table, i64 %stride, ptr %ends, i64 %first, ptr %slot_ids, ptr %generations) {
entry:
  %cmp.i46.not = icmp eq i64 %slots, 0
  br i1 %cmp.i46.not, label %run.exit, label %for.body.i.lr.ph

for.body.i.lr.ph:
  %cmp16.i37.not = icmp eq i64 %rows, 0
  %mul21.i = mul i64 %rows, %slots
  %0 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 128), align 64
  %1 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 11), align 1
  %2 = load <8 x i64>, ptr @SECRET, align 64
  %3 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 8), align 8
  %4 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 16), align 16
  %5 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 24), align 8
  %6 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 32), align 32
  %7 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 40), align 8
  %8 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 48), align 16
  %9 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 56), align 8
  %10 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 64), align 64
  %11 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 72), align 8
  %12 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 80), align 16
  %13 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 88), align 8
  %14 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 96), align 32
  %15 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 104), align 8
  %16 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 112), align 16
  %17 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 120), align 8
  br label %for.body.i

for.body.i:
  %row.0.i48 = phi i64 [ 0, %for.body.i.lr.ph ], [ %row.1.i.lcssa, %if.end139.i ]
  %slot.0.i47 = phi i64 [ 0, %for.body.i.lr.ph ], [ %inc141.i, %if.end139.i ]
  %arrayidx.i = getelementptr %struct.state, ptr %states, i64 %slot.0.i47
  %18 = load <8 x i64>, ptr %arrayidx.i, align 1
  %left2.i = getelementptr i8, ptr %arrayidx.i, i64 64
  %19 = load i64, ptr %left2.i, align 8
  %total3.i = getelementptr i8, ptr %arrayidx.i, i64 72
  %20 = load i64, ptr %total3.i, align 8
  %arrayidx5.i = getelementptr i64, ptr %slot_ids, i64 %slot.0.i47
  %21 = load i64, ptr %arrayidx5.i, align 8
  %mul.i = mul i64 %21, %stride
  %add.ptr.i = getelementptr i8, ptr %table, i64 %mul.i
  %arrayidx6.i = getelementptr i64, ptr %generations, i64 %slot.0.i47
  %22 = load i64, ptr %arrayidx6.i, align 8
  %vecinit13.i = insertelement <8 x i64> <i64 poison, i64 0, i64 0, i64 0, i64 0, i64 0, i64 0, i64 0>, i64 %22, i64 0
  store <8 x i64> %vecinit13.i, ptr %add.ptr.i, align 64, !nontemporal !0
  br i1 %cmp16.i37.not, label %for.cond.cleanup17.i, label %for.body18.i.preheader

for.body18.i.preheader:
  %23 = getelementptr <8 x i64>, ptr %add.ptr.i, i64 %first
  %add.ptr14.i = getelementptr i8, ptr %23, i64 64
  br label %for.body18.i

for.cond.cleanup17.i:
  %left.0.i.lcssa = phi i64 [ %19, %for.body.i ], [ %left.1.i.lcssa, %if.end117.i ]
  %sums.0.i.lcssa = phi <8 x i64> [ %18, %for.body.i ], [ %sums.1.i.lcssa, %if.end117.i ]
  %row.1.i.lcssa = phi i64 [ %row.0.i48, %for.body.i ], [ %add20.i, %if.end117.i ]
  %24 = load i64, ptr %left2.i, align 8
  %cmp125.not.i = icmp eq i64 %24, 0
  br i1 %cmp125.not.i, label %if.end139.i, label %if.then127.i

for.body18.i:
  %row.1.i42 = phi i64 [ %add20.i, %if.end117.i ], [ %row.0.i48, %for.body18.i.preheader ]
  %sums.0.i41 = phi <8 x i64> [ %sums.1.i.lcssa, %if.end117.i ], [ %18, %for.body18.i.preheader ]
  %left.0.i40 = phi i64 [ %left.1.i.lcssa, %if.end117.i ], [ %19, %for.body18.i.preheader ]
  %sums_at.1.i39 = phi ptr [ %sums_at.2.i, %if.end117.i ], [ %add.ptr14.i, %for.body18.i.preheader ]
  %j.0.i38 = phi i64 [ %inc119.i, %if.end117.i ], [ 0, %for.body18.i.preheader ]
  %arrayidx19.i = getelementptr ptr, ptr %sources, i64 %row.1.i42
  %25 = load ptr, ptr %arrayidx19.i, align 8
  %add20.i = add i64 %row.1.i42, 1
  %cmp22.i = icmp ult i64 %add20.i, %mul21.i
  %cond.i = select i1 %cmp22.i, i64 %add20.i, i64 %row.1.i42
  %arrayidx24.i = getelementptr ptr, ptr %sources, i64 %cond.i
  %26 = load ptr, ptr %arrayidx24.i, align 8
  %arrayidx27.i = getelementptr ptr, ptr %targets, i64 %row.1.i42
  %27 = load ptr, ptr %arrayidx27.i, align 8
  %arrayidx31.i = getelementptr i64, ptr %lengths, i64 %j.0.i38
  %28 = load i64, ptr %arrayidx31.i, align 8
  %div218.i = lshr i64 %28, 6
  %cond36.i = tail call i64 @llvm.umin.i64(i64 %div218.i, i64 128)
  %cmp38.i32.not = icmp ult i64 %28, 64
  br i1 %cmp38.i32.not, label %for.cond.cleanup39.i, label %for.body40.i.lr.ph

for.body40.i.lr.ph:
  %mul48.i = shl i64 %cond36.i, 6
  br label %for.body40.i

for.cond.cleanup39.i:
  %left.1.i.lcssa = phi i64 [ %left.0.i40, %for.body18.i ], [ %dec.i, %if.end110.i ]
  %sums.1.i.lcssa = phi <8 x i64> [ %sums.0.i41, %for.body18.i ], [ %sums.6.i, %if.end110.i ]
  %arrayidx114.i = getelementptr i8, ptr %ends, i64 %j.0.i38
  %29 = load i8, ptr %arrayidx114.i, align 1
  %tobool115.not.i = icmp eq i8 %29, 0
  br i1 %tobool115.not.i, label %if.end117.i, label %if.then116.i

for.body40.i:
  %sums.1.i35 = phi <8 x i64> [ %sums.0.i41, %for.body40.i.lr.ph ], [ %sums.6.i, %if.end110.i ]
  %left.1.i34 = phi i64 [ %left.0.i40, %for.body40.i.lr.ph ], [ %dec.i, %if.end110.i ]
  %i.0.i33 = phi i64 [ 0, %for.body40.i.lr.ph ], [ %inc109.i, %if.end110.i ]
  %mul41.i = shl i64 %i.0.i33, 6
  %add.ptr42.i = getelementptr i8, ptr %25, i64 %mul41.i
  %add.ptr44.i = getelementptr i8, ptr %27, i64 %mul41.i
  %add45.i = add i64 %i.0.i33, %cond36.i
  %cmp46.i = icmp ult i64 %add45.i, %div218.i
  %add.ptr49.i = getelementptr i8, ptr %add.ptr42.i, i64 %mul48.i
  %sub.i = sub i64 %add45.i, %div218.i
  %mul52.i = shl i64 %sub.i, 6
  %add.ptr53.i = getelementptr i8, ptr %26, i64 %mul52.i
  %cond55.i = select i1 %cmp46.i, ptr %add.ptr49.i, ptr %add.ptr53.i
  %sub56.i = sub i64 %20, %left.1.i34
  %rem.i = and i64 %sub56.i, 15
  %sub57.i = sub i64 %div218.i, %i.0.i33
  %cmp58.i = icmp ugt i64 %sub57.i, 15
  br i1 %cmp58.i, label %land.lhs.true.i, label %if.else.i

land.lhs.true.i:
  %cmp60.i = icmp eq i64 %rem.i, 0
  %cmp62.i = icmp ugt i64 %left.1.i34, 16
  %or.cond.i = select i1 %cmp60.i, i1 %cmp62.i, i1 false
  br i1 %or.cond.i, label %for.body67.i.preheader, label %if.else.i

for.body67.i.preheader:
  tail call void @llvm.prefetch.p0(ptr %cond55.i, i32 0, i32 2, i32 1)
  %30 = load <8 x i64>, ptr %add.ptr42.i, align 1
  store <8 x i64> %30, ptr %add.ptr44.i, align 64, !nontemporal !0
  %xor.i = xor <8 x i64> %2, %30
  %shuffle.i = shufflevector <8 x i64> %30, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i = add <8 x i64> %shuffle.i, %sums.1.i35
  %and.i = and <8 x i64> %xor.i, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i11 = lshr <8 x i64> %xor.i, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i12 = mul <8 x i64> %and.i, %shr.i11
  %add1.i = add <8 x i64> %add.i, %mul.i12
  %add.ptr69.i.1 = getelementptr i8, ptr %add.ptr42.i, i64 64
  %add.ptr71.i.1 = getelementptr i8, ptr %add.ptr44.i, i64 64
  %add.ptr73.i.1 = getelementptr i8, ptr %cond55.i, i64 64
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.1, i32 0, i32 2, i32 1)
  %31 = load <8 x i64>, ptr %add.ptr69.i.1, align 1
  store <8 x i64> %31, ptr %add.ptr71.i.1, align 64, !nontemporal !0
  %xor.i.1 = xor <8 x i64> %3, %31
  %shuffle.i.1 = shufflevector <8 x i64> %31, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.1 = add <8 x i64> %shuffle.i.1, %add1.i
  %and.i.1 = and <8 x i64> %xor.i.1, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i11.1 = lshr <8 x i64> %xor.i.1, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i12.1 = mul <8 x i64> %and.i.1, %shr.i11.1
  %add1.i.1 = add <8 x i64> %add.i.1, %mul.i12.1
  %add.ptr69.i.2 = getelementptr i8, ptr %add.ptr42.i, i64 128
  %add.ptr71.i.2 = getelementptr i8, ptr %add.ptr44.i, i64 128
  %add.ptr73.i.2 = getelementptr i8, ptr %cond55.i, i64 128
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.2, i32 0, i32 2, i32 1)
  %32 = load <8 x i64>, ptr %add.ptr69.i.2, align 1
  store <8 x i64> %32, ptr %add.ptr71.i.2, align 64, !nontemporal !0
  %xor.i.2 = xor <8 x i64> %4, %32
  %shuffle.i.2 = shufflevector <8 x i64> %32, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.2 = add <8 x i64> %shuffle.i.2, %add1.i.1
  %and.i.2 = and <8 x i64> %xor.i.2, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i11.2 = lshr <8 x i64> %xor.i.2, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i12.2 = mul <8 x i64> %and.i.2, %shr.i11.2
  %add1.i.2 = add <8 x i64> %add.i.2, %mul.i12.2
  %add.ptr69.i.3 = getelementptr i8, ptr %add.ptr42.i, i64 192
  %add.ptr71.i.3 = getelementptr i8, ptr %add.ptr44.i, i64 192
  %add.ptr73.i.3 = getelementptr i8, ptr %cond55.i, i64 192
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.3, i32 0, i32 2, i32 1)
  %33 = load <8 x i64>, ptr %add.ptr69.i.3, align 1
  store <8 x i64> %33, ptr %add.ptr71.i.3, align 64, !nontemporal !0
  %xor.i.3 = xor <8 x i64> %5, %33
  %shuffle.i.3 = shufflevector <8 x i64> %33, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.3 = add <8 x i64> %shuffle.i.3, %add1.i.2
  %and.i.3 = and <8 x i64> %xor.i.3, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i11.3 = lshr <8 x i64> %xor.i.3, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i12.3 = mul <8 x i64> %and.i.3, %shr.i11.3
  %add1.i.3 = add <8 x i64> %add.i.3, %mul.i12.3
  %add.ptr69.i.4 = getelementptr i8, ptr %add.ptr42.i, i64 256
  %add.ptr71.i.4 = getelementptr i8, ptr %add.ptr44.i, i64 256
  %add.ptr73.i.4 = getelementptr i8, ptr %cond55.i, i64 256
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.4, i32 0, i32 2, i32 1)
  %34 = load <8 x i64>, ptr %add.ptr69.i.4, align 1
  store <8 x i64> %34, ptr %add.ptr71.i.4, align 64, !nontemporal !0
  %xor.i.4 = xor <8 x i64> %6, %34
  %shuffle.i.4 = shufflevector <8 x i64> %34, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.4 = add <8 x i64> %shuffle.i.4, %add1.i.3
  %and.i.4 = and <8 x i64> %xor.i.4, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i11.4 = lshr <8 x i64> %xor.i.4, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i12.4 = mul <8 x i64> %and.i.4, %shr.i11.4
  %add1.i.4 = add <8 x i64> %add.i.4, %mul.i12.4
  %add.ptr69.i.5 = getelementptr i8, ptr %add.ptr42.i, i64 320
  %add.ptr71.i.5 = getelementptr i8, ptr %add.ptr44.i, i64 320
  %add.ptr73.i.5 = getelementptr i8, ptr %cond55.i, i64 320
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.5, i32 0, i32 2, i32 1)
  %35 = load <8 x i64>, ptr %add.ptr69.i.5, align 1
  store <8 x i64> %35, ptr %add.ptr71.i.5, align 64, !nontemporal !0
  %xor.i.5 = xor <8 x i64> %7, %35
  %shuffle.i.5 = shufflevector <8 x i64> %35, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.5 = add <8 x i64> %shuffle.i.5, %add1.i.4
  %and.i.5 = and <8 x i64> %xor.i.5, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i11.5 = lshr <8 x i64> %xor.i.5, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i12.5 = mul <8 x i64> %and.i.5, %shr.i11.5
  %add1.i.5 = add <8 x i64> %add.i.5, %mul.i12.5
  %add.ptr69.i.6 = getelementptr i8, ptr %add.ptr42.i, i64 384
  %add.ptr71.i.6 = getelementptr i8, ptr %add.ptr44.i, i64 384
  %add.ptr73.i.6 = getelementptr i8, ptr %cond55.i, i64 384
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.6, i32 0, i32 2, i32 1)
  %36 = load <8 x i64>, ptr %add.ptr69.i.6, align 1
  store <8 x i64> %36, ptr %add.ptr71.i.6, align 64, !nontemporal !0
  %xor.i.6 = xor <8 x i64> %8, %36
  %shuffle.i.6 = shufflevector <8 x i64> %36, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.6 = add <8 x i64> %shuffle.i.6, %add1.i.5
  %and.i.6 = and <8 x i64> %xor.i.6, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i11.6 = lshr <8 x i64> %xor.i.6, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i12.6 = mul <8 x i64> %and.i.6, %shr.i11.6
  %add1.i.6 = add <8 x i64> %add.i.6, %mul.i12.6
  %add.ptr69.i.7 = getelementptr i8, ptr %add.ptr42.i, i64 448
  %add.ptr71.i.7 = getelementptr i8, ptr %add.ptr44.i, i64 448
  %add.ptr73.i.7 = getelementptr i8, ptr %cond55.i, i64 448
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.7, i32 0, i32 2, i32 1)
  %37 = load <8 x i64>, ptr %add.ptr69.i.7, align 1
  store <8 x i64> %37, ptr %add.ptr71.i.7, align 64, !nontemporal !0
  %xor.i.7 = xor <8 x i64> %9, %37
  %shuffle.i.7 = shufflevector <8 x i64> %37, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.7 = add <8 x i64> %shuffle.i.7, %add1.i.6
  %and.i.7 = and <8 x i64> %xor.i.7, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i11.7 = lshr <8 x i64> %xor.i.7, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i12.7 = mul <8 x i64> %and.i.7, %shr.i11.7
  %add1.i.7 = add <8 x i64> %add.i.7, %mul.i12.7
  %add.ptr69.i.8 = getelementptr i8, ptr %add.ptr42.i, i64 512
  %add.ptr71.i.8 = getelementptr i8, ptr %add.ptr44.i, i64 512
  %add.ptr73.i.8 = getelementptr i8, ptr %cond55.i, i64 512
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.8, i32 0, i32 2, i32 1)
  %38 = load <8 x i64>, ptr %add.ptr69.i.8, align 1
  store <8 x i64> %38, ptr %add.ptr71.i.8, align 64, !nontemporal !0
  %xor.i.8 = xor <8 x i64> %10, %38
  %shuffle.i.8 = shufflevector <8 x i64> %38, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.8 = add <8 x i64> %shuffle.i.8, %add1.i.7
  %and.i.8 = and <8 x i64> %xor.i.8, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i11.8 = lshr <8 x i64> %xor.i.8, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i12.8 = mul <8 x i64> %and.i.8, %shr.i11.8
  %add1.i.8 = add <8 x i64> %add.i.8, %mul.i12.8
  %add.ptr69.i.9 = getelementptr i8, ptr %add.ptr42.i, i64 576
  %add.ptr71.i.9 = getelementptr i8, ptr %add.ptr44.i, i64 576
  %add.ptr73.i.9 = getelementptr i8, ptr %cond55.i, i64 576
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.9, i32 0, i32 2, i32 1)
  %39 = load <8 x i64>, ptr %add.ptr69.i.9, align 1
  store <8 x i64> %39, ptr %add.ptr71.i.9, align 64, !nontemporal !0
  %xor.i.9 = xor <8 x i64> %11, %39
  %shuffle.i.9 = shufflevector <8 x i64> %39, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.9 = add <8 x i64> %shuffle.i.9, %add1.i.8
  %and.i.9 = and <8 x i64> %xor.i.9, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i11.9 = lshr <8 x i64> %xor.i.9, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i12.9 = mul <8 x i64> %and.i.9, %shr.i11.9
  %add1.i.9 = add <8 x i64> %add.i.9, %mul.i12.9
  %add.ptr69.i.10 = getelementptr i8, ptr %add.ptr42.i, i64 640
  %add.ptr71.i.10 = getelementptr i8, ptr %add.ptr44.i, i64 640
  %add.ptr73.i.10 = getelementptr i8, ptr %cond55.i, i64 640
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.10, i32 0, i32 2, i32 1)
  %40 = load <8 x i64>, ptr %add.ptr69.i.10, align 1
  store <8 x i64> %40, ptr %add.ptr71.i.10, align 64, !nontemporal !0
  %xor.i.10 = xor <8 x i64> %12, %40
  %shuffle.i.10 = shufflevector <8 x i64> %40, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.10 = add <8 x i64> %shuffle.i.10, %add1.i.9
  %and.i.10 = and <8 x i64> %xor.i.10, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i11.10 = lshr <8 x i64> %xor.i.10, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i12.10 = mul <8 x i64> %and.i.10, %shr.i11.10
  %add1.i.10 = add <8 x i64> %add.i.10, %mul.i12.10
  %add.ptr69.i.11 = getelementptr i8, ptr %add.ptr42.i, i64 704
  %add.ptr71.i.11 = getelementptr i8, ptr %add.ptr44.i, i64 704
  %add.ptr73.i.11 = getelementptr i8, ptr %cond55.i, i64 704
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.11, i32 0, i32 2, i32 1)
  %41 = load <8 x i64>, ptr %add.ptr69.i.11, align 1
  store <8 x i64> %41, ptr %add.ptr71.i.11, align 64, !nontemporal !0
  %xor.i.11 = xor <8 x i64> %13, %41
  %shuffle.i.11 = shufflevector <8 x i64> %41, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.11 = add <8 x i64> %shuffle.i.11, %add1.i.10
  %and.i.11 = and <8 x i64> %xor.i.11, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i11.11 = lshr <8 x i64> %xor.i.11, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i12.11 = mul <8 x i64> %and.i.11, %shr.i11.11
  %add1.i.11 = add <8 x i64> %add.i.11, %mul.i12.11
  %add.ptr69.i.12 = getelementptr i8, ptr %add.ptr42.i, i64 768
  %add.ptr71.i.12 = getelementptr i8, ptr %add.ptr44.i, i64 768
  %add.ptr73.i.12 = getelementptr i8, ptr %cond55.i, i64 768
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.12, i32 0, i32 2, i32 1)
  %42 = load <8 x i64>, ptr %add.ptr69.i.12, align 1
  store <8 x i64> %42, ptr %add.ptr71.i.12, align 64, !nontemporal !0
  %xor.i.12 = xor <8 x i64> %14, %42
  %shuffle.i.12 = shufflevector <8 x i64> %42, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.12 = add <8 x i64> %shuffle.i.12, %add1.i.11
  %and.i.12 = and <8 x i64> %xor.i.12, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i11.12 = lshr <8 x i64> %xor.i.12, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i12.12 = mul <8 x i64> %and.i.12, %shr.i11.12
  %add1.i.12 = add <8 x i64> %add.i.12, %mul.i12.12
  %add.ptr69.i.13 = getelementptr i8, ptr %add.ptr42.i, i64 832
  %add.ptr71.i.13 = getelementptr i8, ptr %add.ptr44.i, i64 832
  %add.ptr73.i.13 = getelementptr i8, ptr %cond55.i, i64 832
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.13, i32 0, i32 2, i32 1)
  %43 = load <8 x i64>, ptr %add.ptr69.i.13, align 1
  store <8 x i64> %43, ptr %add.ptr71.i.13, align 64, !nontemporal !0
  %xor.i.13 = xor <8 x i64> %15, %43
  %shuffle.i.13 = shufflevector <8 x i64> %43, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.13 = add <8 x i64> %shuffle.i.13, %add1.i.12
  %and.i.13 = and <8 x i64> %xor.i.13, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i11.13 = lshr <8 x i64> %xor.i.13, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i12.13 = mul <8 x i64> %and.i.13, %shr.i11.13
  %add1.i.13 = add <8 x i64> %add.i.13, %mul.i12.13
  %add.ptr69.i.14 = getelementptr i8, ptr %add.ptr42.i, i64 896
  %add.ptr71.i.14 = getelementptr i8, ptr %add.ptr44.i, i64 896
  %add.ptr73.i.14 = getelementptr i8, ptr %cond55.i, i64 896
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.14, i32 0, i32 2, i32 1)
  %44 = load <8 x i64>, ptr %add.ptr69.i.14, align 1
  store <8 x i64> %44, ptr %add.ptr71.i.14, align 64, !nontemporal !0
  %xor.i.14 = xor <8 x i64> %16, %44
  %shuffle.i.14 = shufflevector <8 x i64> %44, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.14 = add <8 x i64> %shuffle.i.14, %add1.i.13
  %and.i.14 = and <8 x i64> %xor.i.14, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i11.14 = lshr <8 x i64> %xor.i.14, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i12.14 = mul <8 x i64> %and.i.14, %shr.i11.14
  %add1.i.14 = add <8 x i64> %add.i.14, %mul.i12.14
  %add.ptr69.i.15 = getelementptr i8, ptr %add.ptr42.i, i64 960
  %add.ptr71.i.15 = getelementptr i8, ptr %add.ptr44.i, i64 960
  %add.ptr73.i.15 = getelementptr i8, ptr %cond55.i, i64 960
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.15, i32 0, i32 2, i32 1)
  %45 = load <8 x i64>, ptr %add.ptr69.i.15, align 1
  store <8 x i64> %45, ptr %add.ptr71.i.15, align 64, !nontemporal !0
  %xor.i.15 = xor <8 x i64> %17, %45
  %shuffle.i.15 = shufflevector <8 x i64> %45, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.15 = add <8 x i64> %shuffle.i.15, %add1.i.14
  %and.i.15 = and <8 x i64> %xor.i.15, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i11.15 = lshr <8 x i64> %xor.i.15, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i12.15 = mul <8 x i64> %and.i.15, %shr.i11.15
  %add1.i.15 = add <8 x i64> %add.i.15, %mul.i12.15
  %shr.i = lshr <8 x i64> %add1.i.15, <i64 47, i64 47, i64 47, i64 47, i64 47, i64 47, i64 47, i64 47>
  %46 = xor <8 x i64> %shr.i, %add1.i.15
  %xor1.i = xor <8 x i64> %46, %0
  %mul.i9 = mul <8 x i64> %xor1.i, <i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761>
  br label %if.end110.i

if.else.i:
  tail call void @llvm.prefetch.p0(ptr %cond55.i, i32 0, i32 2, i32 1)
  %47 = load <8 x i64>, ptr %add.ptr42.i, align 1
  store <8 x i64> %47, ptr %add.ptr44.i, align 64, !nontemporal !0
  %cmp92.i = icmp eq i64 %left.1.i34, 1
  %mul95.i = shl i64 %rem.i, 3
  %cond97.i = select i1 %cmp92.i, i64 121, i64 %mul95.i
  %add.ptr98.i = getelementptr i8, ptr @SECRET, i64 %cond97.i
  %48 = load <8 x i64>, ptr %add.ptr98.i, align 1
  %xor.i15 = xor <8 x i64> %48, %47
  %shuffle.i16 = shufflevector <8 x i64> %47, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i17 = add <8 x i64> %shuffle.i16, %sums.1.i35
  %and.i18 = and <8 x i64> %xor.i15, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i19 = lshr <8 x i64> %xor.i15, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i20 = mul <8 x i64> %and.i18, %shr.i19
  %add1.i21 = add <8 x i64> %add.i17, %mul.i20
  %cmp102.i = icmp eq i64 %rem.i, 15
  %cmp104.i = icmp ugt i64 %left.1.i34, 1
  %or.cond143.i = select i1 %cmp102.i, i1 %cmp104.i, i1 false
  br i1 %or.cond143.i, label %if.then105.i, label %if.end110.i

if.then105.i:
  %shr.i23 = lshr <8 x i64> %add1.i21, <i64 47, i64 47, i64 47, i64 47, i64 47, i64 47, i64 47, i64 47>
  %49 = xor <8 x i64> %shr.i23, %add1.i21
  %xor1.i24 = xor <8 x i64> %49, %0
  %mul.i25 = mul <8 x i64> %xor1.i24, <i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761>
  br label %if.end110.i

if.end110.i:
  %.sink53 = phi i64 [ 16, %for.body67.i.preheader ], [ 1, %if.then105.i ], [ 1, %if.else.i ]
  %.sink = phi i64 [ -16, %for.body67.i.preheader ], [ -1, %if.then105.i ], [ -1, %if.else.i ]
  %sums.6.i = phi <8 x i64> [ %mul.i9, %for.body67.i.preheader ], [ %mul.i25, %if.then105.i ], [ %add1.i21, %if.else.i ]
  %inc109.i = add i64 %i.0.i33, %.sink53
  %dec.i = add i64 %left.1.i34, %.sink
  %cmp38.i = icmp ult i64 %inc109.i, %div218.i
  br i1 %cmp38.i, label %for.body40.i, label %for.cond.cleanup39.i

if.then116.i:
  %incdec.ptr.i = getelementptr i8, ptr %sums_at.1.i39, i64 64
  store <8 x i64> %sums.1.i.lcssa, ptr %sums_at.1.i39, align 64, !nontemporal !0
  br label %if.end117.i

if.end117.i:
  %sums_at.2.i = phi ptr [ %incdec.ptr.i, %if.then116.i ], [ %sums_at.1.i39, %for.cond.cleanup39.i ]
  %inc119.i = add i64 %j.0.i38, 1
  %exitcond.not = icmp eq i64 %inc119.i, %rows
  br i1 %exitcond.not, label %for.cond.cleanup17.i, label %for.body18.i

if.then127.i:
  store <8 x i64> %sums.0.i.lcssa, ptr %arrayidx.i, align 8
  store i64 %left.0.i.lcssa, ptr %left2.i, align 8
  %cmp131.i = icmp eq i64 %left.0.i.lcssa, 0
  br i1 %cmp131.i, label %if.then133.i, label %if.end139.i

if.then133.i:
  %xor.i27 = xor <8 x i64> %1, %sums.0.i.lcssa
  %mul.i28 = mul i64 %20, -8224016703601598016
  %vecext.i = extractelement <8 x i64> %xor.i27, i64 0
  %conv.i = zext i64 %vecext.i to i128
  %vecext1.i = extractelement <8 x i64> %xor.i27, i64 1
  %conv2.i = zext i64 %vecext1.i to i128
  %mul3.i = mul i128 %conv2.i, %conv.i
  %shr.i29 = lshr i128 %mul3.i, 64
  %xor616.i = xor i128 %shr.i29, %mul3.i
  %xor6.i = trunc i128 %xor616.i to i64
  %add7.i = add i64 %mul.i28, %xor6.i
  %vecext.1.i = extractelement <8 x i64> %xor.i27, i64 2
  %conv.1.i = zext i64 %vecext.1.i to i128
  %vecext1.1.i = extractelement <8 x i64> %xor.i27, i64 3
  %conv2.1.i = zext i64 %vecext1.1.i to i128
  %mul3.1.i = mul i128 %conv2.1.i, %conv.1.i
  %shr.1.i = lshr i128 %mul3.1.i, 64
  %xor616.1.i = xor i128 %shr.1.i, %mul3.1.i
  %xor6.1.i = trunc i128 %xor616.1.i to i64
  %add7.1.i = add i64 %add7.i, %xor6.1.i
  %vecext.2.i = extractelement <8 x i64> %xor.i27, i64 4
  %conv.2.i = zext i64 %vecext.2.i to i128
  %vecext1.2.i = extractelement <8 x i64> %xor.i27, i64 5
  %conv2.2.i = zext i64 %vecext1.2.i to i128
  %mul3.2.i = mul i128 %conv2.2.i, %conv.2.i
  %shr.2.i = lshr i128 %mul3.2.i, 64
  %xor616.2.i = xor i128 %shr.2.i, %mul3.2.i
  %xor6.2.i = trunc i128 %xor616.2.i to i64
  %add7.2.i = add i64 %add7.1.i, %xor6.2.i
  %vecext.3.i = extractelement <8 x i64> %xor.i27, i64 6
  %conv.3.i = zext i64 %vecext.3.i to i128
  %vecext1.3.i = extractelement <8 x i64> %xor.i27, i64 7
  %conv2.3.i = zext i64 %vecext1.3.i to i128
  %mul3.3.i = mul i128 %conv2.3.i, %conv.3.i
  %shr.3.i = lshr i128 %mul3.3.i, 64
  %xor616.3.i = xor i128 %shr.3.i, %mul3.3.i
  %xor6.3.i = trunc i128 %xor616.3.i to i64
  %add7.3.i = add i64 %add7.2.i, %xor6.3.i
  %shr.i.i = lshr i64 %add7.3.i, 37
  %xor.i.i = xor i64 %shr.i.i, %add7.3.i
  %mul.i.i = mul i64 %xor.i.i, 1609587791953885689
  %shr1.i.i = lshr i64 %mul.i.i, 32
  %xor2.i.i = xor i64 %shr1.i.i, %mul.i.i
  store i64 %xor2.i.i, ptr %total3.i, align 8
  br label %if.end139.i

if.end139.i:
  %inc141.i = add i64 %slot.0.i47, 1
  %exitcond52.not = icmp eq i64 %inc141.i, %slots
  br i1 %exitcond52.not, label %run.exit, label %for.body.i

run.exit:
  fence seq_cst
  ret void
}

define void @hash(ptr %sources, ptr %lengths, i64 %slots, i64 %rows, ptr %states) {
entry:
  %cmp.i38.not = icmp eq i64 %slots, 0
  br i1 %cmp.i38.not, label %run.exit, label %for.body.i.lr.ph

for.body.i.lr.ph:
  %cmp16.i30.not = icmp eq i64 %rows, 0
  %mul21.i = mul i64 %rows, %slots
  %0 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 128), align 64
  %1 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 11), align 1
  %2 = load <8 x i64>, ptr @SECRET, align 64
  %3 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 8), align 8
  %4 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 16), align 16
  %5 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 24), align 8
  %6 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 32), align 32
  %7 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 40), align 8
  %8 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 48), align 16
  %9 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 56), align 8
  %10 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 64), align 64
  %11 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 72), align 8
  %12 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 80), align 16
  %13 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 88), align 8
  %14 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 96), align 32
  %15 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 104), align 8
  %16 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 112), align 16
  %17 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 120), align 8
  br label %for.body.i

for.body.i:
  %row.0.i40 = phi i64 [ 0, %for.body.i.lr.ph ], [ %row.1.i.lcssa, %if.end139.i ]
  %slot.0.i39 = phi i64 [ 0, %for.body.i.lr.ph ], [ %inc141.i, %if.end139.i ]
  %arrayidx.i = getelementptr %struct.state, ptr %states, i64 %slot.0.i39
  %18 = load <8 x i64>, ptr %arrayidx.i, align 1
  %left2.i = getelementptr i8, ptr %arrayidx.i, i64 64
  %19 = load i64, ptr %left2.i, align 8
  %total3.i = getelementptr i8, ptr %arrayidx.i, i64 72
  %20 = load i64, ptr %total3.i, align 8
  br i1 %cmp16.i30.not, label %for.cond.cleanup17.i, label %for.body18.i

for.cond.cleanup17.i:
  %left.0.i.lcssa = phi i64 [ %19, %for.body.i ], [ %left.1.i.lcssa, %for.cond.cleanup39.i ]
  %sums.0.i.lcssa = phi <8 x i64> [ %18, %for.body.i ], [ %sums.1.i.lcssa, %for.cond.cleanup39.i ]
  %row.1.i.lcssa = phi i64 [ %row.0.i40, %for.body.i ], [ %add20.i, %for.cond.cleanup39.i ]
  %cmp125.not.i = icmp eq i64 %19, 0
  br i1 %cmp125.not.i, label %if.end139.i, label %if.then127.i

for.body18.i:
  %row.1.i34 = phi i64 [ %add20.i, %for.cond.cleanup39.i ], [ %row.0.i40, %for.body.i ]
  %sums.0.i33 = phi <8 x i64> [ %sums.1.i.lcssa, %for.cond.cleanup39.i ], [ %18, %for.body.i ]
  %left.0.i32 = phi i64 [ %left.1.i.lcssa, %for.cond.cleanup39.i ], [ %19, %for.body.i ]
  %j.0.i31 = phi i64 [ %inc119.i, %for.cond.cleanup39.i ], [ 0, %for.body.i ]
  %arrayidx19.i = getelementptr ptr, ptr %sources, i64 %row.1.i34
  %21 = load ptr, ptr %arrayidx19.i, align 8
  %add20.i = add i64 %row.1.i34, 1
  %cmp22.i = icmp ult i64 %add20.i, %mul21.i
  %cond.i = select i1 %cmp22.i, i64 %add20.i, i64 %row.1.i34
  %arrayidx24.i = getelementptr ptr, ptr %sources, i64 %cond.i
  %22 = load ptr, ptr %arrayidx24.i, align 8
  %arrayidx31.i = getelementptr i64, ptr %lengths, i64 %j.0.i31
  %23 = load i64, ptr %arrayidx31.i, align 8
  %div218.i = lshr i64 %23, 6
  %cond36.i = tail call i64 @llvm.umin.i64(i64 %div218.i, i64 128)
  %cmp38.i25.not = icmp ult i64 %23, 64
  br i1 %cmp38.i25.not, label %for.cond.cleanup39.i, label %for.body40.i.lr.ph

for.body40.i.lr.ph:
  %mul48.i = shl i64 %cond36.i, 6
  br label %for.body40.i

for.cond.cleanup39.i:
  %left.1.i.lcssa = phi i64 [ %left.0.i32, %for.body18.i ], [ %dec.i, %if.end110.i ]
  %sums.1.i.lcssa = phi <8 x i64> [ %sums.0.i33, %for.body18.i ], [ %sums.6.i, %if.end110.i ]
  %inc119.i = add i64 %j.0.i31, 1
  %exitcond.not = icmp eq i64 %inc119.i, %rows
  br i1 %exitcond.not, label %for.cond.cleanup17.i, label %for.body18.i

for.body40.i:
  %sums.1.i28 = phi <8 x i64> [ %sums.0.i33, %for.body40.i.lr.ph ], [ %sums.6.i, %if.end110.i ]
  %left.1.i27 = phi i64 [ %left.0.i32, %for.body40.i.lr.ph ], [ %dec.i, %if.end110.i ]
  %i.0.i26 = phi i64 [ 0, %for.body40.i.lr.ph ], [ %inc109.i, %if.end110.i ]
  %mul41.i = shl i64 %i.0.i26, 6
  %add.ptr42.i = getelementptr i8, ptr %21, i64 %mul41.i
  %add45.i = add i64 %i.0.i26, %cond36.i
  %cmp46.i = icmp ult i64 %add45.i, %div218.i
  %add.ptr49.i = getelementptr i8, ptr %add.ptr42.i, i64 %mul48.i
  %sub.i = sub i64 %add45.i, %div218.i
  %mul52.i = shl i64 %sub.i, 6
  %add.ptr53.i = getelementptr i8, ptr %22, i64 %mul52.i
  %cond55.i = select i1 %cmp46.i, ptr %add.ptr49.i, ptr %add.ptr53.i
  %sub56.i = sub i64 %20, %left.1.i27
  %rem.i = and i64 %sub56.i, 15
  %sub57.i = sub i64 %div218.i, %i.0.i26
  %cmp58.i = icmp ugt i64 %sub57.i, 15
  br i1 %cmp58.i, label %land.lhs.true.i, label %if.else.i

land.lhs.true.i:
  %cmp60.i = icmp eq i64 %rem.i, 0
  %cmp62.i = icmp ugt i64 %left.1.i27, 16
  %or.cond.i = select i1 %cmp60.i, i1 %cmp62.i, i1 false
  br i1 %or.cond.i, label %for.body67.i.preheader, label %if.else.i

for.body67.i.preheader:
  tail call void @llvm.prefetch.p0(ptr %cond55.i, i32 0, i32 2, i32 1)
  %24 = load <8 x i64>, ptr %add.ptr42.i, align 1
  %xor.i = xor <8 x i64> %2, %24
  %shuffle.i = shufflevector <8 x i64> %24, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i = add <8 x i64> %shuffle.i, %sums.1.i28
  %and.i = and <8 x i64> %xor.i, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4 = lshr <8 x i64> %xor.i, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5 = mul <8 x i64> %and.i, %shr.i4
  %add1.i = add <8 x i64> %add.i, %mul.i5
  %add.ptr69.i.1 = getelementptr i8, ptr %add.ptr42.i, i64 64
  %add.ptr73.i.1 = getelementptr i8, ptr %cond55.i, i64 64
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.1, i32 0, i32 2, i32 1)
  %25 = load <8 x i64>, ptr %add.ptr69.i.1, align 1
  %xor.i.1 = xor <8 x i64> %3, %25
  %shuffle.i.1 = shufflevector <8 x i64> %25, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.1 = add <8 x i64> %shuffle.i.1, %add1.i
  %and.i.1 = and <8 x i64> %xor.i.1, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.1 = lshr <8 x i64> %xor.i.1, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.1 = mul <8 x i64> %and.i.1, %shr.i4.1
  %add1.i.1 = add <8 x i64> %add.i.1, %mul.i5.1
  %add.ptr69.i.2 = getelementptr i8, ptr %add.ptr42.i, i64 128
  %add.ptr73.i.2 = getelementptr i8, ptr %cond55.i, i64 128
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.2, i32 0, i32 2, i32 1)
  %26 = load <8 x i64>, ptr %add.ptr69.i.2, align 1
  %xor.i.2 = xor <8 x i64> %4, %26
  %shuffle.i.2 = shufflevector <8 x i64> %26, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.2 = add <8 x i64> %shuffle.i.2, %add1.i.1
  %and.i.2 = and <8 x i64> %xor.i.2, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.2 = lshr <8 x i64> %xor.i.2, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.2 = mul <8 x i64> %and.i.2, %shr.i4.2
  %add1.i.2 = add <8 x i64> %add.i.2, %mul.i5.2
  %add.ptr69.i.3 = getelementptr i8, ptr %add.ptr42.i, i64 192
  %add.ptr73.i.3 = getelementptr i8, ptr %cond55.i, i64 192
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.3, i32 0, i32 2, i32 1)
  %27 = load <8 x i64>, ptr %add.ptr69.i.3, align 1
  %xor.i.3 = xor <8 x i64> %5, %27
  %shuffle.i.3 = shufflevector <8 x i64> %27, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.3 = add <8 x i64> %shuffle.i.3, %add1.i.2
  %and.i.3 = and <8 x i64> %xor.i.3, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.3 = lshr <8 x i64> %xor.i.3, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.3 = mul <8 x i64> %and.i.3, %shr.i4.3
  %add1.i.3 = add <8 x i64> %add.i.3, %mul.i5.3
  %add.ptr69.i.4 = getelementptr i8, ptr %add.ptr42.i, i64 256
  %add.ptr73.i.4 = getelementptr i8, ptr %cond55.i, i64 256
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.4, i32 0, i32 2, i32 1)
  %28 = load <8 x i64>, ptr %add.ptr69.i.4, align 1
  %xor.i.4 = xor <8 x i64> %6, %28
  %shuffle.i.4 = shufflevector <8 x i64> %28, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.4 = add <8 x i64> %shuffle.i.4, %add1.i.3
  %and.i.4 = and <8 x i64> %xor.i.4, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.4 = lshr <8 x i64> %xor.i.4, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.4 = mul <8 x i64> %and.i.4, %shr.i4.4
  %add1.i.4 = add <8 x i64> %add.i.4, %mul.i5.4
  %add.ptr69.i.5 = getelementptr i8, ptr %add.ptr42.i, i64 320
  %add.ptr73.i.5 = getelementptr i8, ptr %cond55.i, i64 320
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.5, i32 0, i32 2, i32 1)
  %29 = load <8 x i64>, ptr %add.ptr69.i.5, align 1
  %xor.i.5 = xor <8 x i64> %7, %29
  %shuffle.i.5 = shufflevector <8 x i64> %29, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.5 = add <8 x i64> %shuffle.i.5, %add1.i.4
  %and.i.5 = and <8 x i64> %xor.i.5, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.5 = lshr <8 x i64> %xor.i.5, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.5 = mul <8 x i64> %and.i.5, %shr.i4.5
  %add1.i.5 = add <8 x i64> %add.i.5, %mul.i5.5
  %add.ptr69.i.6 = getelementptr i8, ptr %add.ptr42.i, i64 384
  %add.ptr73.i.6 = getelementptr i8, ptr %cond55.i, i64 384
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.6, i32 0, i32 2, i32 1)
  %30 = load <8 x i64>, ptr %add.ptr69.i.6, align 1
  %xor.i.6 = xor <8 x i64> %8, %30
  %shuffle.i.6 = shufflevector <8 x i64> %30, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.6 = add <8 x i64> %shuffle.i.6, %add1.i.5
  %and.i.6 = and <8 x i64> %xor.i.6, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.6 = lshr <8 x i64> %xor.i.6, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.6 = mul <8 x i64> %and.i.6, %shr.i4.6
  %add1.i.6 = add <8 x i64> %add.i.6, %mul.i5.6
  %add.ptr69.i.7 = getelementptr i8, ptr %add.ptr42.i, i64 448
  %add.ptr73.i.7 = getelementptr i8, ptr %cond55.i, i64 448
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.7, i32 0, i32 2, i32 1)
  %31 = load <8 x i64>, ptr %add.ptr69.i.7, align 1
  %xor.i.7 = xor <8 x i64> %9, %31
  %shuffle.i.7 = shufflevector <8 x i64> %31, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.7 = add <8 x i64> %shuffle.i.7, %add1.i.6
  %and.i.7 = and <8 x i64> %xor.i.7, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.7 = lshr <8 x i64> %xor.i.7, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.7 = mul <8 x i64> %and.i.7, %shr.i4.7
  %add1.i.7 = add <8 x i64> %add.i.7, %mul.i5.7
  %add.ptr69.i.8 = getelementptr i8, ptr %add.ptr42.i, i64 512
  %add.ptr73.i.8 = getelementptr i8, ptr %cond55.i, i64 512
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.8, i32 0, i32 2, i32 1)
  %32 = load <8 x i64>, ptr %add.ptr69.i.8, align 1
  %xor.i.8 = xor <8 x i64> %10, %32
  %shuffle.i.8 = shufflevector <8 x i64> %32, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.8 = add <8 x i64> %shuffle.i.8, %add1.i.7
  %and.i.8 = and <8 x i64> %xor.i.8, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.8 = lshr <8 x i64> %xor.i.8, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.8 = mul <8 x i64> %and.i.8, %shr.i4.8
  %add1.i.8 = add <8 x i64> %add.i.8, %mul.i5.8
  %add.ptr69.i.9 = getelementptr i8, ptr %add.ptr42.i, i64 576
  %add.ptr73.i.9 = getelementptr i8, ptr %cond55.i, i64 576
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.9, i32 0, i32 2, i32 1)
  %33 = load <8 x i64>, ptr %add.ptr69.i.9, align 1
  %xor.i.9 = xor <8 x i64> %11, %33
  %shuffle.i.9 = shufflevector <8 x i64> %33, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.9 = add <8 x i64> %shuffle.i.9, %add1.i.8
  %and.i.9 = and <8 x i64> %xor.i.9, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.9 = lshr <8 x i64> %xor.i.9, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.9 = mul <8 x i64> %and.i.9, %shr.i4.9
  %add1.i.9 = add <8 x i64> %add.i.9, %mul.i5.9
  %add.ptr69.i.10 = getelementptr i8, ptr %add.ptr42.i, i64 640
  %add.ptr73.i.10 = getelementptr i8, ptr %cond55.i, i64 640
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.10, i32 0, i32 2, i32 1)
  %34 = load <8 x i64>, ptr %add.ptr69.i.10, align 1
  %xor.i.10 = xor <8 x i64> %12, %34
  %shuffle.i.10 = shufflevector <8 x i64> %34, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.10 = add <8 x i64> %shuffle.i.10, %add1.i.9
  %and.i.10 = and <8 x i64> %xor.i.10, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.10 = lshr <8 x i64> %xor.i.10, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.10 = mul <8 x i64> %and.i.10, %shr.i4.10
  %add1.i.10 = add <8 x i64> %add.i.10, %mul.i5.10
  %add.ptr69.i.11 = getelementptr i8, ptr %add.ptr42.i, i64 704
  %add.ptr73.i.11 = getelementptr i8, ptr %cond55.i, i64 704
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.11, i32 0, i32 2, i32 1)
  %35 = load <8 x i64>, ptr %add.ptr69.i.11, align 1
  %xor.i.11 = xor <8 x i64> %13, %35
  %shuffle.i.11 = shufflevector <8 x i64> %35, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.11 = add <8 x i64> %shuffle.i.11, %add1.i.10
  %and.i.11 = and <8 x i64> %xor.i.11, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.11 = lshr <8 x i64> %xor.i.11, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.11 = mul <8 x i64> %and.i.11, %shr.i4.11
  %add1.i.11 = add <8 x i64> %add.i.11, %mul.i5.11
  %add.ptr69.i.12 = getelementptr i8, ptr %add.ptr42.i, i64 768
  %add.ptr73.i.12 = getelementptr i8, ptr %cond55.i, i64 768
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.12, i32 0, i32 2, i32 1)
  %36 = load <8 x i64>, ptr %add.ptr69.i.12, align 1
  %xor.i.12 = xor <8 x i64> %14, %36
  %shuffle.i.12 = shufflevector <8 x i64> %36, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.12 = add <8 x i64> %shuffle.i.12, %add1.i.11
  %and.i.12 = and <8 x i64> %xor.i.12, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.12 = lshr <8 x i64> %xor.i.12, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.12 = mul <8 x i64> %and.i.12, %shr.i4.12
  %add1.i.12 = add <8 x i64> %add.i.12, %mul.i5.12
  %add.ptr69.i.13 = getelementptr i8, ptr %add.ptr42.i, i64 832
  %add.ptr73.i.13 = getelementptr i8, ptr %cond55.i, i64 832
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.13, i32 0, i32 2, i32 1)
  %37 = load <8 x i64>, ptr %add.ptr69.i.13, align 1
  %xor.i.13 = xor <8 x i64> %15, %37
  %shuffle.i.13 = shufflevector <8 x i64> %37, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.13 = add <8 x i64> %shuffle.i.13, %add1.i.12
  %and.i.13 = and <8 x i64> %xor.i.13, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.13 = lshr <8 x i64> %xor.i.13, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.13 = mul <8 x i64> %and.i.13, %shr.i4.13
  %add1.i.13 = add <8 x i64> %add.i.13, %mul.i5.13
  %add.ptr69.i.14 = getelementptr i8, ptr %add.ptr42.i, i64 896
  %add.ptr73.i.14 = getelementptr i8, ptr %cond55.i, i64 896
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.14, i32 0, i32 2, i32 1)
  %38 = load <8 x i64>, ptr %add.ptr69.i.14, align 1
  %xor.i.14 = xor <8 x i64> %16, %38
  %shuffle.i.14 = shufflevector <8 x i64> %38, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.14 = add <8 x i64> %shuffle.i.14, %add1.i.13
  %and.i.14 = and <8 x i64> %xor.i.14, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.14 = lshr <8 x i64> %xor.i.14, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.14 = mul <8 x i64> %and.i.14, %shr.i4.14
  %add1.i.14 = add <8 x i64> %add.i.14, %mul.i5.14
  %add.ptr69.i.15 = getelementptr i8, ptr %add.ptr42.i, i64 960
  %add.ptr73.i.15 = getelementptr i8, ptr %cond55.i, i64 960
  tail call void @llvm.prefetch.p0(ptr %add.ptr73.i.15, i32 0, i32 2, i32 1)
  %39 = load <8 x i64>, ptr %add.ptr69.i.15, align 1
  %xor.i.15 = xor <8 x i64> %17, %39
  %shuffle.i.15 = shufflevector <8 x i64> %39, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i.15 = add <8 x i64> %shuffle.i.15, %add1.i.14
  %and.i.15 = and <8 x i64> %xor.i.15, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i4.15 = lshr <8 x i64> %xor.i.15, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i5.15 = mul <8 x i64> %and.i.15, %shr.i4.15
  %add1.i.15 = add <8 x i64> %add.i.15, %mul.i5.15
  %shr.i = lshr <8 x i64> %add1.i.15, <i64 47, i64 47, i64 47, i64 47, i64 47, i64 47, i64 47, i64 47>
  %40 = xor <8 x i64> %shr.i, %add1.i.15
  %xor1.i = xor <8 x i64> %40, %0
  %mul.i = mul <8 x i64> %xor1.i, <i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761>
  br label %if.end110.i

if.else.i:
  tail call void @llvm.prefetch.p0(ptr %cond55.i, i32 0, i32 2, i32 1)
  %41 = load <8 x i64>, ptr %add.ptr42.i, align 1
  %cmp92.i = icmp eq i64 %left.1.i27, 1
  %mul95.i = shl i64 %rem.i, 3
  %cond97.i = select i1 %cmp92.i, i64 121, i64 %mul95.i
  %add.ptr98.i = getelementptr i8, ptr @SECRET, i64 %cond97.i
  %42 = load <8 x i64>, ptr %add.ptr98.i, align 1
  %xor.i8 = xor <8 x i64> %42, %41
  %shuffle.i9 = shufflevector <8 x i64> %41, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i10 = add <8 x i64> %shuffle.i9, %sums.1.i28
  %and.i11 = and <8 x i64> %xor.i8, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i12 = lshr <8 x i64> %xor.i8, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i13 = mul <8 x i64> %and.i11, %shr.i12
  %add1.i14 = add <8 x i64> %add.i10, %mul.i13
  %cmp102.i = icmp eq i64 %rem.i, 15
  %cmp104.i = icmp ugt i64 %left.1.i27, 1
  %or.cond143.i = select i1 %cmp102.i, i1 %cmp104.i, i1 false
  br i1 %or.cond143.i, label %if.then105.i, label %if.end110.i

if.then105.i:
  %shr.i16 = lshr <8 x i64> %add1.i14, <i64 47, i64 47, i64 47, i64 47, i64 47, i64 47, i64 47, i64 47>
  %43 = xor <8 x i64> %shr.i16, %add1.i14
  %xor1.i17 = xor <8 x i64> %43, %0
  %mul.i18 = mul <8 x i64> %xor1.i17, <i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761>
  br label %if.end110.i

if.end110.i:
  %.sink45 = phi i64 [ 16, %for.body67.i.preheader ], [ 1, %if.then105.i ], [ 1, %if.else.i ]
  %.sink = phi i64 [ -16, %for.body67.i.preheader ], [ -1, %if.then105.i ], [ -1, %if.else.i ]
  %sums.6.i = phi <8 x i64> [ %mul.i, %for.body67.i.preheader ], [ %mul.i18, %if.then105.i ], [ %add1.i14, %if.else.i ]
  %inc109.i = add i64 %i.0.i26, %.sink45
  %dec.i = add i64 %left.1.i27, %.sink
  %cmp38.i = icmp ult i64 %inc109.i, %div218.i
  br i1 %cmp38.i, label %for.body40.i, label %for.cond.cleanup39.i

if.then127.i:
  store <8 x i64> %sums.0.i.lcssa, ptr %arrayidx.i, align 8
  store i64 %left.0.i.lcssa, ptr %left2.i, align 8
  %cmp131.i = icmp eq i64 %left.0.i.lcssa, 0
  br i1 %cmp131.i, label %if.then133.i, label %if.end139.i

if.then133.i:
  %xor.i20 = xor <8 x i64> %1, %sums.0.i.lcssa
  %mul.i21 = mul i64 %20, -8224016703601598016
  %vecext.i = extractelement <8 x i64> %xor.i20, i64 0
  %conv.i = zext i64 %vecext.i to i128
  %vecext1.i = extractelement <8 x i64> %xor.i20, i64 1
  %conv2.i = zext i64 %vecext1.i to i128
  %mul3.i = mul i128 %conv2.i, %conv.i
  %shr.i22 = lshr i128 %mul3.i, 64
  %xor616.i = xor i128 %shr.i22, %mul3.i
  %xor6.i = trunc i128 %xor616.i to i64
  %add7.i = add i64 %mul.i21, %xor6.i
  %vecext.1.i = extractelement <8 x i64> %xor.i20, i64 2
  %conv.1.i = zext i64 %vecext.1.i to i128
  %vecext1.1.i = extractelement <8 x i64> %xor.i20, i64 3
  %conv2.1.i = zext i64 %vecext1.1.i to i128
  %mul3.1.i = mul i128 %conv2.1.i, %conv.1.i
  %shr.1.i = lshr i128 %mul3.1.i, 64
  %xor616.1.i = xor i128 %shr.1.i, %mul3.1.i
  %xor6.1.i = trunc i128 %xor616.1.i to i64
  %add7.1.i = add i64 %add7.i, %xor6.1.i
  %vecext.2.i = extractelement <8 x i64> %xor.i20, i64 4
  %conv.2.i = zext i64 %vecext.2.i to i128
  %vecext1.2.i = extractelement <8 x i64> %xor.i20, i64 5
  %conv2.2.i = zext i64 %vecext1.2.i to i128
  %mul3.2.i = mul i128 %conv2.2.i, %conv.2.i
  %shr.2.i = lshr i128 %mul3.2.i, 64
  %xor616.2.i = xor i128 %shr.2.i, %mul3.2.i
  %xor6.2.i = trunc i128 %xor616.2.i to i64
  %add7.2.i = add i64 %add7.1.i, %xor6.2.i
  %vecext.3.i = extractelement <8 x i64> %xor.i20, i64 6
  %conv.3.i = zext i64 %vecext.3.i to i128
  %vecext1.3.i = extractelement <8 x i64> %xor.i20, i64 7
  %conv2.3.i = zext i64 %vecext1.3.i to i128
  %mul3.3.i = mul i128 %conv2.3.i, %conv.3.i
  %shr.3.i = lshr i128 %mul3.3.i, 64
  %xor616.3.i = xor i128 %shr.3.i, %mul3.3.i
  %xor6.3.i = trunc i128 %xor616.3.i to i64
  %add7.3.i = add i64 %add7.2.i, %xor6.3.i
  %shr.i.i = lshr i64 %add7.3.i, 37
  %xor.i.i = xor i64 %shr.i.i, %add7.3.i
  %mul.i.i = mul i64 %xor.i.i, 1609587791953885689
  %shr1.i.i = lshr i64 %mul.i.i, 32
  %xor2.i.i = xor i64 %shr1.i.i, %mul.i.i
  store i64 %xor2.i.i, ptr %total3.i, align 8
  br label %if.end139.i

if.end139.i:
  %inc141.i = add i64 %slot.0.i39, 1
  %exitcond44.not = icmp eq i64 %inc141.i, %slots
  br i1 %exitcond44.not, label %run.exit, label %for.body.i

run.exit:
  fence seq_cst
  ret void
}

declare void @llvm.prefetch.p0(ptr, i32, i32, i32)

declare i64 @llvm.umin.i64(i64, i64)


!0 = !{i32 1}
